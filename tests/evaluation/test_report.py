"""The page: well-formed, whole by itself, everything escaped; and the plot in it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from ragcache.evaluation.chart import Axis, Point, axis, frontier, scatter
from ragcache.evaluation.grid import PLAIN
from ragcache.evaluation.passages import Asked
from ragcache.evaluation.questions import Question
from ragcache.evaluation.recommend import recommend
from ragcache.evaluation.report import html_report, plots
from ragcache.evaluation.result import Circumstances, Evaluation, summaries
from ragcache.evaluation.run import LeftOut
from tests.evaluation.samples import BETTER, REPAIRED, record

NASTY = """<script>alert("x")</script> & 'co' </td>"""
VOID = {"meta", "br", "line", "circle", "polyline"}


class WellFormed(HTMLParser):
    """Fails on a tag that is not closed where it should be; keeps what a reader sees."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.texts.append(data)


def parsed(page: str) -> WellFormed:
    parser = WellFormed()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


@pytest.fixture
def evaluation() -> Evaluation:
    asked = [Asked(Question(f"{number} {NASTY}", (NASTY,) if number else ()), (), 1.0) for number in range(3)]
    records = [
        [
            record(question=it.question.text, setting=PLAIN, kl=(0.2, 0.4 + number)),
            record(
                question=it.question.text,
                setting=BETTER,
                kl=(0.1 * number,),
                agrees=(True,),
                answer=f"The same start, then {NASTY}",
                full_answer="The same start, but another end",
                misses=("corrupt",),
                ttft_ms=20.0,
            ),
        ]
        for number, it in enumerate(asked)
    ]
    found = summaries(asked, records, seed=0)
    about = Circumstances(
        date="2026-11-30T12:00:00+00:00",
        store=NASTY,
        model="m",
        embedding_model="e",
        dtype="float32",
        codecs=("hidden int8",),
        fingerprint="0" * 64,
        device="cpu",
        machine="a processor",
        versions={"torch": "2"},
        max_tokens=32,
        seed=0,
    )
    left_out = [LeftOut(REPAIRED, f"not there {NASTY}")]
    return Evaluation(about, asked, records, found, left_out, recommend(found, 0.9))


def test_the_page_is_whole_by_itself_and_escaped(evaluation: Evaluation) -> None:
    page = html_report(evaluation)
    parser = parsed(page)
    names = {tag for tag, _ in parser.tags}
    assert not names & {"script", "link", "img", "iframe", "object"}
    assert not [key for _, attributes in parser.tags for key in attributes if key in ("src", "href", "onclick")]
    assert not re.search(r"https?:|url\(|@import", page)
    said = " ".join("".join(parser.texts).split())
    # What is escaped reads as it was written.
    assert said.count(" ".join(NASTY.split())) >= 8
    assert "Numbers are those of the table" in said
    assert REPAIRED.label in said


def test_the_worst_answers_come_first_and_show_where_they_part(evaluation: Evaluation) -> None:
    page = html_report(evaluation)
    assert f"Worst answers with {BETTER.label}" in page
    assert [page.index(f"<h3>{number} ") for number in (2, 1, 0)] == sorted(
        page.index(f"<h3>{number} ") for number in range(3)
    )
    assert "The same start, <mark>but another end</mark>" in page
    assert "The same start, <mark>then &lt;script&gt;" in page
    assert page.count("<b>Gold</b>") == 2


def test_figures_without_limit_are_shown_and_kept_out_of_the_plot(evaluation: Evaluation) -> None:
    rows = [[row[0].model_copy(update={"kl": (math.inf,), "agrees": (False,)}), row[1]] for row in evaluation.records]
    found = summaries(evaluation.asked, rows, seed=0)
    page = html_report(replace(evaluation, records=rows, summaries=found, recommendation=None))
    parsed(page)
    assert "inf" in page
    assert page.count("<circle") == 2
    dumped = json.loads(replace(evaluation, records=rows, summaries=found).to_json())
    assert dumped["settings"][0]["kl"]["mean"] is None
    assert dumped["records"][0]["kl"] == [None]


def test_json_can_be_asked_again(evaluation: Evaluation) -> None:
    dumped = json.loads(evaluation.to_json())
    assert dumped["questions"][1] == {"question": f"1 {NASTY}", "answers": [NASTY], "documents": []}
    assert dumped["recommendation"] == {"target_agreement": 0.9, "met": True, "setting": BETTER.model_dump(mode="json")}
    assert [it["label"] for it in dumped["settings"]] == [PLAIN.label, BETTER.label]
    assert len(dumped["records"]) == 6


def point(x: float, y: float) -> Point:
    return Point("1", "one", x, y, y, y)


def test_the_line_joins_what_nothing_else_beats() -> None:
    points = [point(1, 0.8), point(2, 0.7), point(3, 0.95), point(3, 0.9), point(4, 0.94), point(5, 0.99)]
    assert frontier(points, higher_is_better=True) == [points[0], points[2], points[5]]
    assert frontier(points, higher_is_better=False) == [points[0], points[1]]


def test_a_plot_puts_values_where_they_belong() -> None:
    plot = scatter("a & b", [point(0, 0), point(10, 1)], Axis("x", 0, 10), Axis("y", 0, 1), higher_is_better=True)
    assert 'aria-label="a &amp; b"' in plot
    circles = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', plot)
    assert circles == [("64.0", "332.0"), ("620.0", "16.0")]
    parsed(plot)


@pytest.mark.parametrize("values", [[0.5], [0.0, 0.0], [12.0, 830.0], [0.001, 0.0012]])
def test_an_axis_holds_its_values_and_has_round_ticks(values: list[float]) -> None:
    found = axis("x", values, floor=0.0)
    assert found.start <= min(values) <= max(values) < found.stop
    assert 2 <= len(found.ticks) <= 6
    assert all(found.start - 1e-9 <= tick <= found.stop + 1e-9 for tick in found.ticks)
    assert axis("x", values, ceiling=max(values)).stop == max(values)


def test_plots_are_images_by_themselves(evaluation: Evaluation) -> None:
    found = plots(evaluation.summaries)
    assert set(found) == {"agreement.svg", "kl.svg"}
    for plot in found.values():
        root = ElementTree.fromstring(plot)  # noqa: S314
        names = [element.tag.rpartition("}")[2] for element in root.iter()]
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert names.count("circle") == len(evaluation.summaries)
        assert names.count("style") == names.count("rect") == 1
        # No colour is left to a page, and nothing is fetched.
        assert "var(" not in plot
        assert "url(" not in plot
