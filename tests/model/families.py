"""Tiny configurations of families of models: those that are supported, and those that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    BambaConfig,
    BertConfig,
    BloomConfig,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5Config,
    Exaone4Config,
    FalconConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    HeliumConfig,
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    SmolLM3Config,
    StableLmConfig,
    T5Config,
    Zamba2Config,
)

TINY: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**TINY),
    "llama3-rope": lambda: LlamaConfig(
        **TINY,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    ),
    "yarn-rope": lambda: LlamaConfig(
        **TINY,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 512,
        },
    ),
    "llama-biases": lambda: LlamaConfig(**TINY, attention_bias=True),
    "llama-multi-head": lambda: LlamaConfig(**TINY | {"num_key_value_heads": 6}),
    "qwen2": lambda: Qwen2Config(**TINY),
    "qwen3": lambda: Qwen3Config(**TINY),
    "mistral": lambda: MistralConfig(**TINY, sliding_window=None),
    "mistral-window": lambda: MistralConfig(**TINY, sliding_window=48),
    # Partial rotary embedding, projections with biases, attention and MLP side by side.
    "phi": lambda: PhiConfig(**TINY | {"partial_rotary_factor": 0.5}),
    # Embeddings scaled by the square root of their width.
    "gemma": lambda: GemmaConfig(**TINY),
    # Multipliers on embeddings, attention, residuals and logits.
    "granite": lambda: GraniteConfig(
        **TINY, embedding_multiplier=3.0, attention_multiplier=0.3, residual_multiplier=0.5, logits_scaling=2.0
    ),
    "mixtral": lambda: MixtralConfig(**TINY, num_local_experts=4, sliding_window=None),
    "qwen2-window": lambda: Qwen2Config(**TINY, use_sliding_window=True, sliding_window=40, max_window_layers=1),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **TINY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, decoder_sparse_step=2
    ),
    # Scores capped by a tanh, every other layer with a window, norms on either side of the attention.
    "gemma2": lambda: Gemma2Config(**TINY, sliding_window=40, query_pre_attn_scalar=16, attn_logit_softcapping=5.0),
    # A rotation of its own in layers with a window, keys normalised.
    "gemma3": lambda: Gemma3TextConfig(
        **TINY | {"num_hidden_layers": 4},
        sliding_window=40,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
        },
    ),
    # Images are another model's concern; the decoder lies one level deeper.
    "gemma3-images": lambda: Gemma3Config(
        text_config=FAMILIES["gemma3"]().to_dict(),
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
    ),
    # One matrix for queries, keys and values; part of a head is rotated.
    "phi3": lambda: Phi3Config(
        **TINY,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "phi3-window": lambda: Phi3Config(**TINY, pad_token_id=0, sliding_window=48),
    # One matrix, head by head; biases; attention and MLP side by side, or not.
    "gpt-neox": lambda: GPTNeoXConfig(
        **TINY, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    ),
    "gpt-neox-serial": lambda: GPTNeoXConfig(**TINY, use_parallel_residual=False),
    # Norms behind the attention; keys normalised over all heads.
    "olmo2": lambda: Olmo2Config(**TINY),
    "olmo3": lambda: Olmo3Config(
        **TINY, sliding_window=40, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    # Every other layer without positions.
    "smollm3": lambda: SmolLM3Config(**TINY, pad_token_id=0, no_rope_layer_interval=2),
    # Neighbouring values rotated together.
    "cohere": lambda: CohereConfig(**TINY, pad_token_id=0),
    "cohere-key-norm": lambda: CohereConfig(**TINY, pad_token_id=0, use_qk_norm=True),
    # The same, with cosines and sines in another order; part of a head is rotated.
    "glm": lambda: GlmConfig(**TINY, pad_token_id=0),
    "glm4": lambda: Glm4Config(**TINY, pad_token_id=0),
    "helium": lambda: HeliumConfig(**TINY, pad_token_id=0),
    "ernie4.5": lambda: Ernie4_5Config(**TINY, pad_token_id=0),
    # Positions in layers with a window only.
    "exaone4": lambda: Exaone4Config(
        **TINY, sliding_window=40, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "cohere2": lambda: Cohere2Config(
        **TINY,
        pad_token_id=0,
        sliding_window=40,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}

SMALL: dict[str, Any] = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}

LONG_FACTORS = [1.0] * 8

REFUSED_FAMILIES: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "dynamic-rope": (
        lambda: LlamaConfig(**TINY, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
        "depend on the length of the whole prompt",
    ),
    "phi3-longrope": (
        lambda: Phi3Config(
            **TINY,
            pad_token_id=0,
            original_max_position_embeddings=2048,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": LONG_FACTORS,
                "long_factor": LONG_FACTORS,
                "original_max_position_embeddings": 2048,
            },
        ),
        "depend on the length of the whole prompt",
    ),
    "phi-key-norm": (lambda: PhiConfig(**TINY, qk_layernorm=True), "normalises its keys in a way of its own"),
    "olmo-clipped": (lambda: OlmoConfig(**TINY, clip_qkv=8.0), "keys and values are clipped"),
    "embedding-gemma": (
        lambda: Gemma3TextConfig(**TINY, use_bidirectional_attention=True),
        "attends to later tokens",
    ),
    "gpt-oss": (lambda: GptOssConfig(**TINY, num_local_experts=4), "attention sinks"),
    "llama4": (lambda: Llama4TextConfig(**TINY), "chunks of fixed places"),
    "deepseek-v2": (lambda: DeepseekV2Config(**SMALL), "multi-head latent attention"),
    "deepseek-v3": (lambda: DeepseekV3Config(**SMALL), "multi-head latent attention"),
    "mamba": (lambda: MambaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2), "linear_attention"),
    "jamba": (lambda: JambaConfig(**SMALL, num_key_value_heads=2), "linear_attention"),
    "zamba2": (lambda: Zamba2Config(**SMALL, layers_block_type=["mamba", "hybrid"] * 2), "linear_attention"),
    "bamba": (lambda: BambaConfig(**SMALL, mamba_n_heads=4, mamba_d_head=16), "linear_attention"),
    "falcon-h1": (lambda: FalconH1Config(**SMALL), "hybrid"),
    "recurrent-gemma": (lambda: RecurrentGemmaConfig(**SMALL), "linear_attention"),
    "qwen3-next": (lambda: Qwen3NextConfig(**SMALL), "linear_attention"),
    "gpt2": (lambda: GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2), "no rotary positions"),
    "opt": (lambda: OPTConfig(**SMALL, word_embed_proj_dim=32, ffn_dim=32), "no rotary positions"),
    "bloom": (lambda: BloomConfig(vocab_size=100, hidden_size=32, n_layer=2, n_head=2), "no rotary positions"),
    "bert": (lambda: BertConfig(**SMALL), "no rotary positions"),
    "falcon": (lambda: FalconConfig(**SMALL), "not found where"),
    "t5": (lambda: T5Config(vocab_size=100, d_model=32, num_layers=2, num_heads=2), "encoder's output"),
}
"""Those that are refused before their weights are read."""

UNCERTIFIED_FAMILIES: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "stablelm": (lambda: StableLmConfig(**TINY), "keyword arguments"),
}
"""Those that turn out not to work when they are run."""
