from __future__ import annotations

import torch

from ragcache.states.encoded import Moves, Run

CPU = torch.device("cpu")


def test_what_lies_together_is_known_without_looking() -> None:
    together = Moves.of([Run(64, 10, 64), Run(128, 74, 5)], 192, CPU)
    assert (together.row_span, together.slot_span) == (slice(64, 133), slice(10, 79))
    apart = Moves.of([Run(0, 10, 60), Run(64, 71, 5)], 128, CPU)
    assert (apart.row_span, apart.slot_span) == (None, None)


def test_tokens_and_rows_name_each_other() -> None:
    moves = Moves.of([Run(0, 0, 70), Run(128, 100, 3), Run(192, 200, 64)], 256, CPU)
    assert moves.tokens == 137
    assert moves.token_of_row[moves.rows.long()].tolist() == list(range(137))
    assert (moves.token_of_row >= 0).sum() == 137
    assert moves.slots.data_ptr() % 16 == moves.token_of_row.data_ptr() % 16 == 0
    assert moves.slots.tolist() == [*range(70), *range(100, 103), *range(200, 264)]
