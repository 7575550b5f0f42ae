from __future__ import annotations

import pytest
import torch

from ragcache.generate.sampling import Sampler, SamplingParameters

LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))


def frequencies(draws: int = 4000, **parameters: float) -> torch.Tensor:
    sampler = Sampler(SamplingParameters(seed=1, **parameters))  # type: ignore[arg-type]
    return torch.bincount(torch.tensor([sampler.next_token(LOGITS) for _ in range(draws)]), minlength=4) / draws


def test_greedy_is_the_default() -> None:
    assert Sampler(SamplingParameters()).next_token(LOGITS) == 0


def test_temperature_one_draws_from_the_distribution() -> None:
    torch.testing.assert_close(frequencies(temperature=1.0), LOGITS.exp(), atol=0.03, rtol=0)


def test_low_temperature_sharpens() -> None:
    expected = torch.softmax(LOGITS / 0.5, 0)
    torch.testing.assert_close(frequencies(temperature=0.5), expected, atol=0.03, rtol=0)


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    torch.testing.assert_close(
        frequencies(temperature=1.0, top_p=0.7), torch.tensor([0.625, 0.375, 0, 0]), atol=0.03, rtol=0
    )
    assert frequencies(temperature=1.0, top_p=1e-6).tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("smallest", [1e-38, 1e-45, 1e-320, 5e-324])
def test_the_smallest_values_are_greedy(smallest: float) -> None:
    assert frequencies(draws=10, temperature=smallest).tolist() == [1, 0, 0, 0]
    assert frequencies(draws=10, temperature=1.0, top_p=smallest).tolist() == [1, 0, 0, 0]


def test_a_seed_repeats_and_none_does_not() -> None:
    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParameters(temperature=1.0, seed=seed))
        return [sampler.next_token(torch.zeros(1000)) for _ in range(20)]

    assert draw(5) == draw(5)
    assert draw(5) != draw(6)
    assert draw(None) != draw(None)
