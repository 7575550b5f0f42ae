"""Full prefill of the same tokens with each of transformers' attention implementations, and with ragcache's own.

The demo compares with the fastest of them; this is where "fastest" comes from.

python benchmarks/prefill_attention.py --tokens 4096
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pydoc_data.topics import topics

import torch

from ragcache.model.capture import prefill
from ragcache.model.loading import load_language_model
from ragcache.settings import load_settings

IMPLEMENTATIONS = ("sdpa", "eager", "flex_attention")


def seconds(run: Callable[[], object], repeats: int) -> float:
    """The fastest of some runs, after one to warm up."""
    run()
    times = []
    for _ in range(repeats):
        clock = time.perf_counter()
        run()
        times.append(time.perf_counter() - clock)
    return min(times)


def main() -> None:
    """Time each implementation in one process, with the same weights and dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    settings = load_settings(model=arguments.model, dtype=arguments.dtype)
    model = load_language_model(
        settings.model, dtype=settings.dtype, device=settings.device, cache_folder=settings.cache_folder
    )
    text = "\n".join(text for _, text in sorted(topics.items()))
    token_ids: list[int] = model.tokenizer(text, add_special_tokens=False)["input_ids"][: arguments.tokens]
    ids = model.tensor(token_ids)[None]
    print(f"{settings.model}, {settings.dtype}, {len(token_ids)} tokens, {torch.get_num_threads()} threads")

    def transformers_prefill() -> None:
        with torch.inference_mode():
            model.module(input_ids=ids, use_cache=True, logits_to_keep=1)

    ours = seconds(lambda: prefill(model, token_ids), arguments.repeats)
    print(f"{'ragcache':>15} {ours:8.2f} s")
    for name in IMPLEMENTATIONS:
        try:
            model.module.set_attn_implementation(name)
            print(f"{name:>15} {seconds(transformers_prefill, arguments.repeats):8.2f} s", flush=True)
        except (ValueError, ImportError, RuntimeError, NotImplementedError) as error:
            print(f"{name:>15} not available: {str(error).splitlines()[0][:80]}", flush=True)


if __name__ == "__main__":
    main()
