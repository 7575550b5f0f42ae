"""Weights that are stored in fewer bits, as `quantization_config` in a model's config.json says.

Transformers loads them; what is here keeps it from loading something else than they stand for.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.quantizers.auto import AutoHfQuantizer

from ragcache.errors import UnsupportedModelError
from ragcache.model.quiet import no_warnings


def quantisation_method(config: PreTrainedConfig) -> str | None:
    """What a model's weights are quantised with; None if they are not.

    Raises:
        UnsupportedModelError: transformers knows no such method. It would only warn and take the bits for numbers.
    """
    stored: Any = getattr(config, "quantization_config", None)
    if stored is None:
        return None
    method = stored.get("quant_method") if isinstance(stored, dict) else None
    try:
        with no_warnings():
            known = AutoHfQuantizer.supports_quant_method(stored)
    except (AttributeError, TypeError, ValueError):
        known = False
    if not known:
        raise UnsupportedModelError(f"the weights are quantised with {method!r}, which transformers cannot read")
    return str(method or "bitsandbytes")


def prepare_quantised(config: PreTrainedConfig, device: torch.device) -> None:
    """Change a configuration, in place, so that weights are loaded as what they stand for.

    Compressed tensors stay in their files' format until the first forward, and until then look like ordinary weights of
    an integer type, so they are de-quantised at once. That takes no more memory than the first forward would. Products
    of 8-bit floats need a GPU; transformers looks for one on the machine, not at where the model goes.
    """
    stored: Any = getattr(config, "quantization_config", None)
    method = None if stored is None else stored.get("quant_method")
    if method == "compressed-tensors" or (method == "fp8" and device.type == "cpu"):
        stored["dequantize"] = True
