"""Attention layers of well-known models, as far as restoring is concerned."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ragcache.model.attention import KeyNorm


@dataclass(frozen=True)
class Rotation:
    """A `RopeShape`."""

    interleaved: bool
    rotary_dim: int


@dataclass(frozen=True)
class Attention:
    """Shapes of a layer.

    Attributes:
        hidden_size: width of the hidden states.
        kv_heads: number of key/value heads.
        head_dim: width of a head.
        rotation: None without RoPE.
        bias: whether the projections have biases.
        key_norm: `each head`, `each head, centred` (with weights of its own for each head), `over heads` or None.
    """

    hidden_size: int
    kv_heads: int
    head_dim: int
    rotation: Rotation | None
    bias: bool = False
    key_norm: str | None = None

    @property
    def width(self) -> int:
        """Keys of a token, all heads."""
        return self.kv_heads * self.head_dim

    def random_key_norm(self, device: torch.device) -> KeyNorm | None:
        """With weights around 1."""
        if self.key_norm is None:
            return None
        size = self.head_dim if self.key_norm == "each head" else self.width
        weight = 1 + 0.3 * torch.randn(size, device=device)
        return KeyNorm(weight, 1e-5, self.key_norm == "over heads", self.key_norm == "each head, centred")


FAMILIES = {
    "SmolLM2-135M": Attention(576, 3, 64, Rotation(False, 64)),
    "Llama-3.1-8B": Attention(4096, 8, 128, Rotation(False, 128)),
    "Qwen2.5-7B": Attention(3584, 4, 128, Rotation(False, 128), bias=True),
    "Qwen3-8B": Attention(4096, 8, 128, Rotation(False, 128), key_norm="each head"),
    "Gemma-2-9B": Attention(3584, 8, 256, Rotation(False, 256)),
    "Gemma-3-4B": Attention(2560, 4, 256, Rotation(False, 256), key_norm="each head"),
    "Phi-2": Attention(2560, 32, 80, Rotation(False, 32), bias=True),
    "Phi-3-mini": Attention(3072, 32, 96, Rotation(False, 96)),
    "Command-R+": Attention(12288, 8, 128, Rotation(True, 128), key_norm="each head, centred"),
    "OLMo-2-7B": Attention(4096, 32, 128, Rotation(False, 128), key_norm="over heads"),
    "SmolLM3-3B without RoPE": Attention(2048, 4, 128, None),
}
