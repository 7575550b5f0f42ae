from __future__ import annotations

import pytest
import torch

from ragcache.restore.workspace import KEPT, Workspace, WorkspacePool

CPU = torch.device("cpu")


def test_a_buffer_is_kept_while_it_is_large_enough() -> None:
    workspace = Workspace()
    first = workspace.take("a", (4, 8), torch.float32, CPU)
    assert workspace.take("a", (3, 5), torch.bfloat16, CPU).data_ptr() == first.data_ptr()
    assert workspace.take("b", (4, 8), torch.float32, CPU).data_ptr() != first.data_ptr()
    assert workspace.take("a", (100, 8), torch.float32, CPU).shape == (100, 8)


def test_a_workspace_is_one_requests_and_then_the_nexts() -> None:
    pool = WorkspacePool()
    with pool.lend() as one, pool.lend() as other:
        assert one is not other
    with pool.lend() as again:
        assert again in (one, other)


def test_after_an_error_it_is_not_kept() -> None:
    """A thread may still write into it."""
    pool = WorkspacePool()
    with pytest.raises(KeyboardInterrupt), pool.lend() as failed:
        raise KeyboardInterrupt
    with pool.lend() as one, pool.lend() as other:
        assert failed not in (one, other)


def test_few_are_kept() -> None:
    pool = WorkspacePool()
    lent = [pool.lend() for _ in range(KEPT + 3)]
    for it in lent:
        it.__enter__()
    for it in lent:
        it.__exit__(None, None, None)
    assert len(pool._idle) == KEPT
