"""What is kept of a layer, so that its keys and values can be rebuilt at any position."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

import torch
from torch import Tensor

from ragcache.states.arrangement import Arrangement, decode
from ragcache.states.codec import Codec, Part, bytes_per_token, codec_named, encoded_size


class Form(StrEnum):
    """The states a layer's KV is rebuilt from.

    `tokens`: nothing but token ids, for the first layers; the first one's input is the embedding. `hidden`: the normed
    hidden states that enter the layer's attention (HCache, EuroSys'25, section 3, there before the norm).
    `pre_rope_kv`: keys (after the K norm where there is one) and values before RoPE. KV after RoPE are never stored:
    they are bound to a position.
    """

    TOKENS = "tokens"
    HIDDEN = "hidden"
    PRE_ROPE_KV = "pre_rope_kv"

    @property
    def parts(self) -> tuple[Part, ...]:
        """What is encoded for each layer, in order."""
        match self:
            case Form.TOKENS:
                return ()
            case Form.HIDDEN:
                return (Part.HIDDEN,)
            case Form.PRE_ROPE_KV:
                return (Part.KEYS, Part.VALUES)


@dataclass(frozen=True)
class LayerFormat:
    """How one layer is stored.

    Attributes:
        form: what is stored.
        width: values per token and part; 0 for `tokens`.
        codec: name of the codec that turns values into bytes.
    """

    form: Form
    width: int
    codec: str


@dataclass(frozen=True)
class StateFormat:
    """How a chunk's states are stored, layer by layer.

    Attributes:
        dtype: precision of the states before encoding, such as `bfloat16`.
        layers: one entry per layer of the model.
    """

    dtype: str
    layers: tuple[LayerFormat, ...]

    def codecs(self, layer: int) -> list[Codec]:
        """The codecs of a layer's parts."""
        it = self.layers[layer]
        return [codec_named(it.codec, self.dtype, part) for part in it.form.parts]

    def size(self, layer: int, tokens: int) -> int:
        """Bytes of a layer of a chunk."""
        return sum(encoded_size(codec, tokens, self.layers[layer].width) for codec in self.codecs(layer))

    @property
    def bytes_per_token(self) -> float:
        """Bytes of all layers, for one token among many."""
        return sum(
            bytes_per_token(codec, self.layers[layer].width)
            for layer in self.stored_layers
            for codec in self.codecs(layer)
        )

    def encode(self, layer: int, states: Tensor) -> Tensor:
        """States of a layer of a chunk, `[parts, tokens, width]`, to `[size(layer, tokens)]` uint8."""
        return torch.cat([codec.encode(part) for codec, part in zip(self.codecs(layer), states.unbind(), strict=True)])

    def decode(self, layer: int, data: Tensor, out: Tensor) -> None:
        """Inverse of `encode`, into `out`, `[parts, tokens, width]`."""
        start = 0
        for codec, part in zip(self.codecs(layer), out.unbind(), strict=True):
            end = start + encoded_size(codec, *part.shape)
            decode(codec, data[start:end], part)
            start = end

    def arrange(self, layer: int, lengths: Sequence[int]) -> Arrangement:
        """The places of a layer of chunks of some lengths, in tokens, in one buffer."""
        return Arrangement(self.codecs(layer), self.layers[layer].width, lengths)

    @property
    def stored_layers(self) -> list[int]:
        """Layers that take space on disk, in order."""
        return [index for index, layer in enumerate(self.layers) if layer.form is not Form.TOKENS]

    @property
    def exact(self) -> bool:
        """Whether decoding gives back exactly what was encoded."""
        return all(codec.exact for layer in self.stored_layers for codec in self.codecs(layer))

    def to_json(self) -> str:
        """Canonical JSON; equal formats give equal text."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> StateFormat:
        """Inverse of `to_json`.

        Raises:
            ValueError: not a format this version understands.
        """
        try:
            record = json.loads(text)
            layers = tuple(LayerFormat(Form(it["form"]), int(it["width"]), str(it["codec"])) for it in record["layers"])
            format = cls(str(record["dtype"]), layers)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a state format: {text[:80]}") from error
        for layer in range(len(layers)):
            format.codecs(layer)
        return format
