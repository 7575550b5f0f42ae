"""What lies in a store is never unpickled: neither does the code say so, nor does it happen."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ragcache
from ragcache import RagCache
from ragcache.maintenance import rebuild_store
from tests.conftest import make_document

MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
CALLS = {"torch.load", "np.load", "numpy.load", "pd.read_pickle", "faiss.read_index"}

_unpickled: list[str] = []
_watching = False


def sources() -> Iterator[Path]:
    package = Path(ragcache.__file__).parent
    yield from package.rglob("*.py")
    for linked in ("indexer", "retriever", "server"):
        yield from (package / linked).resolve().rglob("*.py")


def test_no_module_can_unpickle() -> None:
    seen = 0
    for source in sources():
        seen += 1
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Import):
                assert not MODULES & {alias.name.split(".")[0] for alias in node.names}, source
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in MODULES, source
            elif isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in CALLS, source
    assert seen > 80


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if _watching and event == "pickle.find_class":
        _unpickled.append(str(arguments))


def test_nothing_is_unpickled(cache: RagCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own audit event. The hook stays for the life of the process, so it looks only while it is told to."""
    sys.addaudithook(_watch)
    monkeypatch.setattr(sys.modules[__name__], "_watching", True)
    cache.index([make_document(7)])
    assert cache.query("Which ships passed?").tokens.restored > 0
    cache.delete("doc-0")
    cache.compact(0.0)
    assert not cache.verify().faults
    rebuild_store(cache.path, cache.settings, lambda: cache.embedder)
    assert not _unpickled

    import pickle

    pickle.loads(pickle.dumps(Path("x")))  # noqa: S301
    assert _unpickled
