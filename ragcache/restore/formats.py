"""How a model's states may be stored, and how they are."""

from __future__ import annotations

from ragcache.errors import ProfileError
from ragcache.model.attention import AttentionLayer
from ragcache.model.language_model import LanguageModel
from ragcache.restore.costs import layer_costs
from ragcache.restore.plan import plan
from ragcache.restore.profile import Profile
from ragcache.settings import CodecName, StatesName
from ragcache.states.form import Form, LayerFormat, StateFormat

PLANNED_TOKENS = 4096
"""Tokens of the prompt that a format is planned for. Only layers with sliding windows make a difference of it."""

PLANNED_CHUNK_TOKENS = 512


def state_format(
    model: LanguageModel,
    states: StatesName,
    codec: CodecName,
    profile: Profile | None = None,
    *,
    in_context: bool = False,
) -> StateFormat:
    """How a model's states are stored.

    Args:
        model: the model.
        states: the form; `auto` plans it (`ragcache.restore.plan`).
        codec: of all layers.
        profile: rates of the machine; needed for `auto` where `candidates` leaves a choice.
        in_context: see `candidates`.

    Raises:
        ProfileError: there is a choice and no profile.
    """
    device = profile.device if profile else model.device.type
    choices = candidates(model, states, codec, device, in_context=in_context)
    if any(len(layer) > 1 for layer in choices):
        if profile is None:
            raise ProfileError(f"planning the states of {model.name} needs the rates of this machine")
        costs = layer_costs(model, choices, profile, PLANNED_TOKENS, PLANNED_CHUNK_TOKENS)
        forms = plan(costs, profile).forms
        choices = [[it for it in layer if it.form is form] for layer, form in zip(choices, forms, strict=True)]
    return StateFormat(model.fingerprint.dtype, tuple(layer[0] for layer in choices))


def candidates(
    model: LanguageModel, states: StatesName, codec: CodecName, device: str, *, in_context: bool = False
) -> list[list[LayerFormat]]:
    """The ways in which each layer may be stored, without those that another one beats on every machine.

    The first layer's input is little more than the embedding, so of hidden states there is nothing to store. Its keys
    and values need no embedding, norm and projection: 1 ms instead of 12 for 4,096 tokens of SmolLM2 on 2 cores, a
    fifth of the whole. Where all other layers store keys and values, so does it, unless a GPU computes.

    Keys and values need no projection; where they also take no more bytes, hidden states are out of the question.
    Recomputing more than the first layer from tokens is considered on GPUs only. It pays where computing a layer takes
    less time than reading it: that is 18,000 FLOP for each byte of SmolLM2's int8 keys and values, and 200,000 for a
    model of 8 billion weights, so a CPU would have to achieve 2 TFLOP/s beside a disk of 100 MB/s. The last layer is
    never recomputed, for then nothing would be stored.

    Args:
        model: the model.
        states: the form that was asked for.
        codec: of all layers.
        device: type of the device that restores, `cpu` or `cuda`.
        in_context: chunks are encoded after real text too, which is not there when a layer is recomputed from the
            chunk's tokens; only of the first layer's input tokens are all there is to know.
    """
    first, *others = every_form(model, codec)
    if states != "auto":
        form = Form(states.replace("-", "_"))
        return [[first.get(form, first[Form.TOKENS])], *([it[form]] for it in others)]
    choices = []
    for formats in others:
        sizes = {form: StateFormat(model.fingerprint.dtype, (it,)).bytes_per_token for form, it in formats.items()}
        if device == "cpu" or in_context or formats is others[-1]:
            del formats[Form.TOKENS]
        if sizes[Form.PRE_ROPE_KV] <= sizes[Form.HIDDEN]:
            del formats[Form.HIDDEN]
        choices.append(list(formats.values()))
    if device == "cpu" and all(list(formats) == [Form.PRE_ROPE_KV] for formats in others):
        del first[Form.TOKENS]
    return [list(first.values()), *choices]


def every_form(model: LanguageModel, codec: CodecName) -> list[dict[Form, LayerFormat]]:
    """All ways in which each layer can be stored."""
    formats = []
    for layer in model.decoder.layers:
        widths = _widths(layer, model.decoder.hidden_size)
        if layer.index == 0:
            del widths[Form.HIDDEN]
        formats.append({form: LayerFormat(form, width, codec) for form, width in widths.items()})
    return formats


def fits(format: StateFormat, model: LanguageModel) -> bool:
    """Whether states of a format can be restored by a model."""
    stored = format.stored_layers
    return (
        format.dtype == model.fingerprint.dtype
        and len(format.layers) == len(model.decoder.layers)
        # What follows from token ids alone are the first layers.
        and stored == list(range(len(format.layers) - len(stored), len(format.layers)))
        and all(
            _widths(model.decoder.layers[index], model.decoder.hidden_size).get(format.layers[index].form)
            == format.layers[index].width
            for index in stored
        )
    )


def _widths(layer: AttentionLayer, hidden_size: int) -> dict[Form, int]:
    """Values per token and part of each form, those that need no projection first."""
    return {Form.TOKENS: 0, Form.PRE_ROPE_KV: layer.kv_heads * layer.head_dim, Form.HIDDEN: hidden_size}
