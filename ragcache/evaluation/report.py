"""The result as one page of HTML that needs nothing else: no network, no script."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from ragcache.evaluation.chart import Point, axis, scatter, standalone
from ragcache.evaluation.passages import Asked
from ragcache.evaluation.record import Record
from ragcache.evaluation.result import Evaluation
from ragcache.evaluation.summary import Interval, Summary

WORST = 10
"""Examples shown."""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --faint: #667; --rule: #d7dbe0; --best: #0a5fb4;
  --part: #b4380a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --paper: #14171b; --faint: #9aa3ae; --rule: #343a42;
  --best: #6db3f8; --part: #ff9a6b; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1100px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; } h3 { font-size: 1rem; }
p.note, dl { color: var(--faint); }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; } .plots figure { flex: 1 1 460px; margin: 0; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--ink); }
.grid { stroke: var(--rule); } .frontier { fill: none; stroke: var(--best); stroke-width: 1.5; }
.interval { stroke: var(--faint); } .best circle { fill: var(--best); } .other circle { fill: var(--faint); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap; }
th:nth-child(2), td:nth-child(2) { text-align: left; } tr.recommended { font-weight: 600; }
td small { color: var(--faint); font-weight: 400; }
dt { float: left; clear: left; width: 11rem; } dd { margin-left: 11.5rem; overflow-wrap: anywhere; }
.sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(260px, 1fr)); gap: 1rem; }
.sides > div { border: 1px solid var(--rule); border-radius: 6px; padding: .5rem .8rem; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.sides b { display: block; color: var(--faint); font-weight: 600; } mark { background: none; color: var(--part);
  text-decoration: underline; }
"""


def html_report(evaluation: Evaluation) -> str:
    """The page."""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>ragcache evaluate: ',
        escape(evaluation.circumstances.store),
        '</title><meta name="viewport" content="width=device-width, initial-scale=1"><style>',
        STYLE,
        "</style></head><body>",
        f"<h1>Fidelity and time to first token: {escape(evaluation.circumstances.store)}</h1>",
        _introduction(evaluation),
        _recommendation(evaluation),
        "<h2>Trade-off</h2>",
        _plots(evaluation.summaries),
        "<h2>Settings</h2>",
        _table(evaluation),
        _left_out(evaluation),
        *_examples(evaluation),
        "<h2>Circumstances</h2>",
        _circumstances(evaluation),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _introduction(evaluation: Evaluation) -> str:
    return (
        f"<p>{len(evaluation.asked)} questions. Each answer over composed states is compared with the one that a full "
        "prefill of the very same token ids gives, at every token of the full prefill's answer: the Kullback-Leibler "
        "divergence of the next token's distribution, in nats, and whether the most probable token is the same. "
        "In parentheses: 95% of bootstrap resamples of the questions.</p>"
    )


def _recommendation(evaluation: Evaluation) -> str:
    if evaluation.recommendation is None:
        return ""
    lines = "<br>".join(escape(line) for line in evaluation.recommendation.lines)
    return f"<h2>Recommendation</h2><p>{lines}</p>"


def plots(summaries: Sequence[Summary]) -> dict[str, str]:
    """Files of the plots, each an SVG image that needs nothing else, by name."""
    return {f"{name}.svg": standalone(plot) for name, plot in _scattered(summaries).items()}


def _plots(summaries: Sequence[Summary]) -> str:
    figures = "".join(f"<figure>{plot}</figure>" for plot in _scattered(summaries).values())
    note = (
        "Numbers are those of the table. The line joins settings that no other one beats in both time and fidelity; "
        "bars are 95% intervals."
    )
    return f'<div class="plots">{figures}</div><p class="note">{note}</p>'


def _scattered(summaries: Sequence[Summary]) -> dict[str, str]:
    """SVG elements by what they show."""
    times = [it.ttft_ms for it in summaries]
    across = axis("time to first token, ms (median)", times, floor=0.0)
    shown = [(number, it) for number, it in enumerate(summaries, start=1) if math.isfinite(it.kl.mean)]
    elements = {}
    for key, name, higher, points in (
        ("agreement", "agreement with the full prefill", True, [_point(*it, it[1].agreement) for it in shown]),
        ("kl", "KL from the full prefill, nats", False, [_point(*it, it[1].kl) for it in shown]),
    ):
        if not points:
            continue
        ends = [end for it in points for end in (it.y, it.low, it.high) if math.isfinite(end)]
        down = axis(name, ends, floor=0.0, ceiling=1.0 if higher else None)
        elements[key] = scatter(f"{name} against time to first token", points, across, down, higher_is_better=higher)
    return elements


def _point(number: int, summary: Summary, y: Interval) -> Point:
    description = f"{number}: {summary.setting.label}; {y.mean:.4f}, {summary.ttft_ms:,.0f} ms"
    return Point(str(number), description, summary.ttft_ms, y.mean, y.low, y.high)


def _table(evaluation: Evaluation) -> str:
    plain, recommended = evaluation.plain, evaluation.recommendation
    with_gold = any(it.gold for it in evaluation.summaries)
    columns = ["#", "setting", "KL", "times lower", "worst KL", "agreement", "same answers"]
    columns += ["F1", "F1 full", "EM", "EM full"] if with_gold else []
    columns += ["TTFT ms", "full ms", "times sooner", "prefilled", "misses"]
    rows = []
    for number, it in enumerate(evaluation.summaries, start=1):
        cells = [
            str(number),
            escape(it.setting.label),
            _interval(it.kl, 4),
            f"{plain.kl.mean / it.kl.mean:.1f}" if plain is not None and it.kl.mean else "",
            f"{it.worst_kl:.2f}",
            _interval(it.agreement, 3),
            f"{it.same_answers:.0%}",
        ]
        if with_gold:
            gold = it.gold
            figures = (gold.f1, gold.full_f1, gold.exact_match, gold.full_exact_match) if gold else ()
            cells += [f"{value:.3f}" for value in figures] or [""] * 4
        misses = ", ".join(f"{count} {reason}" for reason, count in sorted(it.misses.items()))
        cells += [
            f"{it.ttft_ms:,.0f}",
            f"{it.full_ttft_ms:,.0f}",
            f"{it.speedup:.1f}",
            f"{it.prefilled_tokens:,.0f}",
            escape(misses),
        ]
        kind = ' class="recommended"' if recommended and recommended.met and recommended.summary is it else ""
        rows.append(f"<tr{kind}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    head = "".join(f'<th scope="col">{name}</th>' for name in columns)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    note = (
        "Times lower: than plain concatenation's KL. F1 and EM (exact match) are against gold answers; those of the "
        "full prefill differ between orders, because the order of passages itself moves answers. Prefilled: tokens "
        "run through the model before the first one of the answer."
    )
    return f'<div class="wide">{table}</div><p class="note">{note}</p>'


def _interval(it: Interval, digits: int) -> str:
    return f"{it.mean:.{digits}f} <small>({it.low:.{digits}f} to {it.high:.{digits}f})</small>"


def _left_out(evaluation: Evaluation) -> str:
    items = "".join(f"<li>{escape(it.setting.label)}: {escape(it.reason)}</li>" for it in evaluation.left_out)
    return f"<p>Left out:</p><ul>{items}</ul>" if items else ""


def _examples(evaluation: Evaluation) -> Iterable[str]:
    """The answers of the highest KL, with the setting that one would take."""
    if evaluation.recommendation is not None:
        taken = evaluation.recommendation.summary
    else:
        taken = max(evaluation.summaries, key=lambda it: it.agreement.mean)
    column = evaluation.summaries.index(taken)
    pairs = [(asked, row[column]) for asked, row in zip(evaluation.asked, evaluation.records, strict=True)]
    pairs.sort(key=lambda it: -it[1].divergence.mean_kl)
    yield f"<h2>Worst answers with {escape(taken.setting.label)}</h2>"
    for asked, record in pairs[:WORST]:
        yield _example(asked, record)


def _example(asked: Asked, record: Record) -> str:
    shared = _shared(record.full_answer, record.answer)
    found = record.divergence
    sides = [
        f"<div><b>Full prefill</b>{_parting(record.full_answer, shared)}</div>",
        f"<div><b>{escape(record.setting.label)}</b>{_parting(record.answer, shared)}</div>",
    ]
    if asked.question.answers:
        sides.append(f"<div><b>Gold</b>{escape(' / '.join(asked.question.answers))}</div>")
    return (
        f"<h3>{escape(record.question)}</h3>"
        f'<p class="note">KL {found.mean_kl:.3f}, worst {found.worst_kl:.2f}, agreement {found.agreement:.2f}; '
        f"passages {escape(', '.join(record.chunk_ids))}</p>"
        f'<div class="sides">{"".join(sides)}</div>'
    )


def _shared(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    differing = (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


def _parting(answer: str, shared: int) -> str:
    rest = f"<mark>{escape(answer[shared:])}</mark>" if answer[shared:] else ""
    return escape(answer[:shared]) + rest


def _circumstances(evaluation: Evaluation) -> str:
    it = evaluation.circumstances
    entries = {
        "date": it.date,
        "model": f"{it.model}, {it.dtype}, fingerprint {it.fingerprint[:12]}",
        "embedding model": it.embedding_model,
        "stored states": ", ".join(it.codecs),
        "machine": f"{it.machine} ({it.device})",
        "versions": ", ".join(f"{name} {number}" for name, number in it.versions.items()),
        "answers": f"greedy, at most {it.max_tokens} tokens",
        "seed": str(it.seed),
    }
    return f"<dl>{''.join(f'<dt>{name}</dt><dd>{escape(value)}</dd>' for name, value in entries.items())}</dl>"
