"""What is kept of a layer, so that its keys and values can be rebuilt at any position."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum

from ragcache.states.codec import Codec, codec_named


class Form(StrEnum):
    """The states a layer's KV is rebuilt from.

    `tokens`: nothing but token ids; layer 0's input is the embedding, so this is all it needs. `hidden`: the normed
    hidden states that enter the layer's attention (HCache, EuroSys'25, section 3, there before the norm).
    `pre_rope_kv`: keys and values before RoPE. KV after RoPE are never stored: they are bound to a position.
    """

    TOKENS = "tokens"
    HIDDEN = "hidden"
    PRE_ROPE_KV = "pre_rope_kv"


@dataclass(frozen=True)
class LayerFormat:
    """How one layer is stored.

    Attributes:
        form: what is stored.
        width: values per token; 0 for `tokens`.
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

    def codec(self, layer: int) -> Codec:
        """The codec of a layer."""
        return codec_named(self.layers[layer].codec, self.dtype)

    def row_bytes(self, layer: int) -> int:
        """Bytes per token of a layer."""
        return self.codec(layer).row_bytes(self.layers[layer].width)

    @property
    def stored_layers(self) -> list[int]:
        """Layers that take space on disk, in order."""
        return [index for index, layer in enumerate(self.layers) if layer.form is not Form.TOKENS]

    @property
    def exact(self) -> bool:
        """Whether decoding gives back exactly what was encoded."""
        return all(self.codec(layer).exact for layer in self.stored_layers)

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
            format.codec(layer)
        return format


def hidden_format(layers: int, hidden_size: int, codec: str, dtype: str) -> StateFormat:
    """Hidden states for every layer but the first, which needs only token ids."""
    hidden = LayerFormat(Form.HIDDEN, hidden_size, codec)
    return StateFormat(dtype, (LayerFormat(Form.TOKENS, 0, codec), *[hidden] * (layers - 1)))
