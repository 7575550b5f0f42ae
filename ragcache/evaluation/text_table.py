"""The figures as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from ragcache.evaluation.result import Evaluation


def text_table(evaluation: Evaluation) -> Iterator[str]:
    """A head and a line for each setting."""
    width = max(len(it.setting.label) for it in evaluation.summaries)
    with_gold = any(it.gold for it in evaluation.summaries)
    gold_head = "     F1  F1 full     EM  EM full" if with_gold else ""
    yield f"{'setting':<{width}}      KL   lower  worst  agreement{gold_head}   TTFT   full  sooner"
    for it in evaluation.summaries:
        plain = evaluation.plain
        lower = f"{plain.kl.mean / it.kl.mean:6.1f}x" if plain is not None and it.kl.mean else " " * 7
        gold = ""
        if it.gold is not None:
            gold = (
                f"  {it.gold.f1:.3f}    {it.gold.full_f1:.3f}  {it.gold.exact_match:.3f}"
                f"    {it.gold.full_exact_match:.3f}"
            )
        yield (
            f"{it.setting.label:<{width}}  {it.kl.mean:6.4f} {lower}  {it.worst_kl:5.2f}      {it.agreement.mean:.3f}"
            f"{gold:<{len(gold_head)}}  {it.ttft_ms:5,.0f}  {it.full_ttft_ms:5,.0f}  {it.speedup:5.1f}x"
        )
