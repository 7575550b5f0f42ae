"""The rows of a family's projections that give keys and values, as one matrix.

One product instead of two, and one address for a kernel. Where keys and values have plain matrices of their own, those
become views of the joint one, so that nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Heads:
    """What the rows of a projection stand for.

    Attributes:
        queries: number of query heads.
        head_dim: width of one head.
    """

    queries: int
    head_dim: int


Rows = tuple[Tensor, Tensor | None]
"""A weight `[rows, hidden_size]` and a bias `[rows]`."""

Projection = Callable[[nn.Module, Heads, Tensor], Rows]
"""From an attention module to its rows for keys and values, keys first; the tensor has the model's dtype and device."""


def separate(keys: str = "k_proj", values: str = "v_proj") -> Projection:
    """Keys and values have a module each, of the names given."""

    def rows(attention: nn.Module, heads: Heads, like: Tensor) -> Rows:
        key_rows, value_rows = getattr(attention, keys), getattr(attention, values)
        (key_weight, key_bias), (value_weight, value_bias) = dense(key_rows, like), dense(value_rows, like)
        weight = torch.cat((key_weight, value_weight))
        bias = None
        if key_bias is not None or value_bias is not None:
            biases = ((key_bias, key_weight), (value_bias, value_weight))
            bias = torch.cat([w.new_zeros(len(w)) if b is None else b for b, w in biases])
        for module, span in ((key_rows, slice(len(key_weight))), (value_rows, slice(len(key_weight), None))):
            if is_plain(module):
                module.weight = nn.Parameter(weight[span], requires_grad=False)
        return weight, bias

    return rows


def stacked(name: str = "qkv_proj") -> Projection:
    """One module gives the queries of all heads, then the keys, then the values (Phi-3)."""

    def rows(attention: nn.Module, heads: Heads, like: Tensor) -> Rows:
        weight, bias = dense(getattr(attention, name), like)
        span = slice(heads.queries * heads.head_dim, None)
        return weight[span], None if bias is None else bias[span]

    return rows


def by_head(name: str = "query_key_value") -> Projection:
    """One module gives for each head its queries, its keys and its values (GPT-NeoX)."""

    def rows(attention: nn.Module, heads: Heads, like: Tensor) -> Rows:
        def pick(tensor: Tensor) -> Tensor:
            by_head = tensor.view(-1, 3, heads.head_dim, *tensor.shape[1:])
            return by_head[:, 1:].transpose(0, 1).flatten(0, 2)

        weight, bias = dense(getattr(attention, name), like)
        return pick(weight), None if bias is None else pick(bias)

    return rows


def is_plain(projection: nn.Module) -> bool:
    """Whether a module is a matrix product with its `weight` and nothing else: not quantised, not adapted."""
    return type(projection) is nn.Linear and type(projection.weight) is nn.Parameter


def dense(projection: nn.Module, like: Tensor) -> Rows:
    """Matrix and bias of a linear module, whatever way it keeps them.

    A matrix that is not kept as one, such as a quantised one, is read out as the module's product with the identity.

    Args:
        projection: the module.
        like: a tensor of the dtype and on the device that the model computes in.
    """
    bias: Tensor | None = projection.bias  # type: ignore[assignment]  # every linear module has one
    if is_plain(projection):
        weight: Tensor = projection.weight  # type: ignore[assignment]  # just tested
        return weight.detach(), None if bias is None else bias.detach()
    # With the bias in place, what is left of the matrix after subtracting it would be rounded to the bias's precision.
    setattr(projection, "bias", None)  # noqa: B010  # nn.Module types attributes as modules and tensors
    try:
        identity = torch.eye(int(projection.in_features), dtype=like.dtype, device=like.device)  # type: ignore[arg-type]
        with torch.no_grad():
            weight = projection(identity).T.contiguous()
    finally:
        setattr(projection, "bias", bias)  # noqa: B010
    return weight, bias
