"""What a plan comes to: layers and their forms, and the time to restore prompts of several lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragcache.model.language_model import LanguageModel
from ragcache.restore.costs import LayerCosts, layer_costs, prefill_seconds
from ragcache.restore.formats import PLANNED_TOKENS, state_format
from ragcache.restore.plan import assess
from ragcache.restore.profile import Profile
from ragcache.settings import CodecName
from ragcache.states.form import Form, StateFormat

PROMPT_TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class LayerGroup:
    """Neighbouring layers that are alike.

    Attributes:
        first, last: of the layers.
        form: that they are stored in.
        bytes_per_token: of all of them together.
        read_ms, compute_ms: of all of them together, for a prompt of `PLANNED_TOKENS`.
    """

    first: int
    last: int
    form: Form
    bytes_per_token: float
    read_ms: float
    compute_ms: float


@dataclass(frozen=True)
class RestoreTimes:
    """Predicted milliseconds until the KV of a prompt's chunks are there.

    Attributes:
        tokens: of all chunks.
        planned: restored in the planned forms.
        stored: restored in the forms that the store has, if it has states.
        hidden: restored from hidden states of all layers but the first.
        pre_rope_kv: restored from keys and values of all layers but the first.
        prefill: not restored, the whole prompt run through the model.
    """

    tokens: int
    planned: float
    stored: float | None
    hidden: float
    pre_rope_kv: float
    prefill: float


@dataclass(frozen=True)
class Forecast:
    """A format and what it comes to.

    Attributes:
        bytes_per_token: of all layers.
        groups: the layers.
        times: for prompts of several lengths.
    """

    bytes_per_token: float
    groups: list[LayerGroup]
    times: list[RestoreTimes]


def forecast(
    model: LanguageModel,
    profile: Profile,
    codec: CodecName,
    chunk_tokens: int,
    planned: StateFormat,
    stored: StateFormat | None,
) -> Forecast:
    """Predict what restoring takes.

    Args:
        model: the model.
        profile: rates of the machine.
        codec: of the alternatives.
        chunk_tokens: largest chunk.
        planned: the format to look at.
        stored: the format that the store has.
    """

    def times(tokens: int) -> RestoreTimes:
        def restored(format: StateFormat) -> float:
            costs = layer_costs(model, [[it] for it in format.layers], profile, tokens, chunk_tokens)
            return assess(costs, [it.form for it in format.layers], profile).seconds * 1e3

        return RestoreTimes(
            tokens=tokens,
            planned=restored(planned),
            stored=restored(stored) if stored else None,
            hidden=restored(state_format(model, "hidden", codec)),
            pre_rope_kv=restored(state_format(model, "pre-rope-kv", codec)),
            prefill=prefill_seconds(model, profile, tokens) * 1e3,
        )

    costs = layer_costs(model, [[it] for it in planned.layers], profile, PLANNED_TOKENS, chunk_tokens)
    return Forecast(
        bytes_per_token=planned.bytes_per_token,
        groups=_groups(planned, costs, profile),
        times=[times(tokens) for tokens in PROMPT_TOKENS],
    )


def _groups(format: StateFormat, costs: Sequence[LayerCosts], profile: Profile) -> list[LayerGroup]:
    """Runs of layers of equal form and costs."""
    alike: list[list[int]] = []
    for index, layer in enumerate(costs):
        if alike and costs[alike[-1][-1]] == layer and format.layers[alike[-1][-1]] == format.layers[index]:
            alike[-1].append(index)
        else:
            alike.append([index])
    groups = []
    for layers in alike:
        form = format.layers[layers[0]].form
        run = assess([costs[index] for index in layers], [form] * len(layers), profile)
        size = StateFormat(format.dtype, tuple(format.layers[index] for index in layers)).bytes_per_token
        read_ms, compute_ms = run.read_seconds * 1e3, run.compute_seconds * 1e3
        groups.append(LayerGroup(layers[0], layers[-1], form, size, read_ms, compute_ms))
    return groups
