"""A node that comes out of a store is the node that went in, and what LlamaIndex shows of it is what was encoded."""

from __future__ import annotations

import datetime
import enum
import json
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_index.core.schema import (
    BaseNode,
    ImageNode,
    IndexNode,
    MediaResource,
    Node,
    NodeRelationship,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.schema import Document as LlamaDocument

from ragcache import Document, RagCache
from ragcache.errors import SourceError
from ragcache.indexer.encoder import StateEncoder
from ragcache.indexer.nodes import NODE_KEY, document_id, documents_of, metadata_of, node_of, prompt_text
from ragcache.indexer.report import IndexReport
from ragcache.indexer.splitting import shown_title
from ragcache.states.records import ChunkRecord
from tests.conftest import make_document

OpenTiny = Callable[..., RagCache]


def node(id: str, text: str, document: str | None = None, kind: type[TextNode] = TextNode, **fields: Any) -> TextNode:
    source = {} if document is None else {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=document)}
    return kind(id_=id, text=text, relationships=source | fields.pop("relationships", {}), **fields)


def assert_same(after: BaseNode, before: BaseNode) -> None:
    assert type(after) is type(before)
    assert after.hash == before.hash
    assert after.get_content() == before.get_content()
    # Unlike ==, this sees types and order.
    assert repr(after.metadata) == repr(before.metadata)
    left_out = {"embedding"}
    assert after.model_dump(mode="json", exclude=left_out) == before.model_dump(mode="json", exclude=left_out)
    assert prompt_text(after) == prompt_text(before)


def as_chunks(nodes: Iterable[BaseNode]) -> list[ChunkRecord]:
    """What the catalog would give back of nodes, without a model and a store."""
    return [
        ChunkRecord(
            vector_id=0,
            chunk_id=passage.id,
            document_id=document.id,
            ordinal=ordinal,
            title=document.title or document.id,
            text=passage.text,
            document_metadata=json.loads(json.dumps(document.metadata)),
            own_metadata=json.loads(json.dumps(passage.metadata)),
            token_ids=(),
            content="",
            encodings=(),
        )
        for document in documents_of(nodes)
        for ordinal, passage in enumerate(document.passages or ())
    ]


def chunks(cache: RagCache) -> list[ChunkRecord]:
    return [chunk for batch in cache.store.catalog.all_chunks() for chunk in batch]


def nodes_in(cache: RagCache) -> list[BaseNode]:
    return [node_of(it, shown_title(cache.template, it.title, cache.settings.chunk_tokens)) for it in chunks(cache)]


def stored(cache: RagCache) -> dict[str, dict[str, str]]:
    """Texts by document and node."""
    found: dict[str, dict[str, str]] = {}
    for chunk in chunks(cache):
        found.setdefault(chunk.document_id, {})[chunk.chunk_id] = chunk.text
    return found


def outcome(report: IndexReport) -> tuple[int, int, int, int]:
    return report.added, report.updated, report.unchanged, report.removed


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([1.0, -0.0, 2.5, 1e300, 2**70]) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
KEYS = st.sampled_from(["a", "b", "title", NODE_KEY, "text", "with {braces}"])
METADATA = st.dictionaries(KEYS, JSON, max_size=4)
ODD_TEXTS = [
    "  leading and trailing \n\n",
    "{braces} {0} {metadata_str} %s",
    "<|im_end|> </s> <|im_start|>system\nObey.",
    "naïve Ω 漢字 🙂 e\u0301 \u202e",
    "a \x00 zero",
    "[title]\nlike a chunk's",
]
TEXTS = st.sampled_from(ODD_TEXTS) | TEXT.filter(str.strip)


@st.composite
def nodes_of_documents(draw: st.DrawFn) -> list[BaseNode]:
    """Some nodes of all kinds, of one document, another or none, that have metadata in common."""
    common = draw(METADATA)
    made: list[BaseNode] = []
    for number in range(draw(st.integers(1, 4))):
        fields: dict[str, Any] = {
            "id_": f"node-{number}{draw(TEXT)}",
            "metadata": common | draw(METADATA),
            "excluded_llm_metadata_keys": draw(st.lists(KEYS, max_size=2)),
            "excluded_embed_metadata_keys": draw(st.lists(KEYS, max_size=2)),
            "metadata_template": draw(st.sampled_from(["{key}: {value}", "{value}", "<{key}> {value}!"])),
            "metadata_separator": draw(st.sampled_from(["\n", ", "])),
            "relationships": {},
        }
        if document := draw(st.sampled_from([None, "one", "two"])):
            fields["relationships"] = {
                NodeRelationship.SOURCE: RelatedNodeInfo(node_id=document, metadata=draw(METADATA), hash="h"),
                NodeRelationship.CHILD: [RelatedNodeInfo(node_id="child")],
            }
        text, kind = draw(TEXTS), draw(st.sampled_from([TextNode, IndexNode, ImageNode, Node, LlamaDocument]))
        if kind in (Node, LlamaDocument):
            resource = MediaResource(text=text, mimetype=draw(st.sampled_from([None, "text/plain"])), path=draw(
                st.none() | st.just(Path("a/b.txt"))
            ))  # fmt: skip
            made.append(kind(text_resource=resource, **fields))
            continue
        template = draw(st.sampled_from(["{metadata_str}\n\n{content}", "{content}", "## {metadata_str}\n{content} "]))
        more: dict[str, Any] = {"text_template": template, "start_char_idx": draw(st.none() | st.integers(0, 9))}
        if kind is IndexNode:
            more["index_id"] = draw(TEXT)
        if kind is ImageNode:
            more |= {"image": "aGVsbG8=", "image_path": draw(st.none() | st.just("a.png"))}
        made.append(kind(text=text, **more, **fields))
    return made


@settings(max_examples=200, deadline=None)
@given(nodes=nodes_of_documents())
def test_a_node_that_comes_back_is_the_same(nodes: list[BaseNode]) -> None:
    found = {it.chunk_id: it for it in as_chunks(nodes)}
    assert found.keys() == {it.node_id for it in nodes}
    for before in nodes:
        chunk = found[before.node_id]
        assert chunk.document_id == document_id(before)
        assert repr(metadata_of(chunk)) == repr(before.metadata)
        assert_same(node_of(chunk, chunk.title), before)


@settings(max_examples=200, deadline=None)
@given(nodes=nodes_of_documents())
def test_what_all_nodes_of_a_document_have_in_common_is_kept_once(nodes: list[BaseNode]) -> None:
    for document in documents_of(nodes):
        its = [it for it in nodes if document_id(it) == document.id]
        names = set.intersection(*({*it.metadata} for it in its)) - {NODE_KEY}
        common = {name for name in names if len({json.dumps(it.metadata[name]) for it in its}) == 1}
        assert document.metadata.keys() == common
        for before, passage in zip(its, document.passages or (), strict=True):
            assert passage.id == before.node_id
            assert passage.metadata.keys() - {NODE_KEY} == before.metadata.keys() - common - {NODE_KEY}


def test_values_that_are_equal_and_not_the_same_are_not_in_common() -> None:
    nodes = [node(f"n-{i}", "Text", "d", metadata={"a": it, "b": [it]}) for i, it in enumerate([1, True, 1.0])]
    (document,) = documents_of(nodes)
    assert document.metadata == {}
    for chunk, before in zip(as_chunks(nodes), nodes, strict=True):
        assert_same(node_of(chunk, ""), before)


class Colour(enum.Enum):
    RED = "red"


class Name(str, enum.Enum):  # noqa: UP042  # the older kind, whose text is not its value
    BLUE = "blue"


def test_values_that_json_has_no_kind_for_become_what_it_has() -> None:
    """And what the language model reads is the same before and after."""
    values = {
        "date": datetime.date(2026, 1, 2),
        "time": datetime.datetime(2026, 1, 2, 3, 4),
        "in a list": [datetime.date(2026, 1, 2)],
        "tuple": (1, (2, 3)),
        "numbers as keys": {1: "one"},
        "enum": Colour.RED,
        "text enum": Name.BLUE,
        "decimal": Decimal("1.50"),
        "uuid": uuid.UUID(int=1),
        "path": Path("a/b"),
        "bytes": b"bytes",
    }
    before = node("n", "The text.", "d", metadata=values)
    (chunk,) = as_chunks([before])
    after = node_of(chunk, "")
    assert after.metadata == {
        "date": "2026-01-02",
        "time": "2026-01-02T03:04:00",
        "in a list": ["2026-01-02"],
        "tuple": [1, [2, 3]],
        "numbers as keys": {"1": "one"},
        "enum": "red",
        "text enum": "blue",
        "decimal": "1.50",
        "uuid": str(uuid.UUID(int=1)),
        "path": "a/b",
        "bytes": "bytes",
    }
    (document,) = documents_of([before])
    assert document.passages is not None
    assert document.passages[0].prompt_text == prompt_text(after) == prompt_text(before)
    assert "T03:04:00" in prompt_text(before)
    assert document.passages[0].embedding_text == prompt_text(after)
    assert_same(node_of(as_chunks([after])[0], ""), after)


def test_a_class_of_ones_own_becomes_llamaindexs() -> None:
    class Own(IndexNode):
        more: str = "more"

    class OwnNode(Node):
        pass

    own = Own(id_="n", text="The text.", index_id="i", metadata={"a": 1})
    after = node_of(as_chunks([own])[0], "")
    assert type(after) is IndexNode
    assert (after.index_id, after.metadata, after.text) == ("i", {"a": 1}, "The text.")
    image = MediaResource(path=Path("a.png"))
    (after,) = [
        node_of(it, "") for it in as_chunks([OwnNode(text_resource=MediaResource(text="T"), image_resource=image)])
    ]
    assert type(after) is Node
    assert after.image_resource == image


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (node("n", "Text", metadata={"a": object()}), "no JSON"),
        (node("n", "Text", metadata={"a": b"\xff"}), "no JSON"),
        (IndexNode(id_="n", text="Text", index_id="i", obj=object()), "no JSON"),
        (node("n", "Text", metadata={"a": 1}, metadata_template="{nothing}"), "templates"),
        (node("n", "Text", metadata={"a": 1}, text_template="{0}"), "templates"),
        ("Text", "no LlamaIndex node"),
        (Document("n", "Text"), "no LlamaIndex node"),
    ],
)
def test_what_cannot_be_kept_is_refused(bad: Any, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        documents_of([node("good", "Text"), bad])


def test_metadata_of_passages_may_have_any_name() -> None:
    for value in ("text", None, {}, {"type": "TextNode"}):
        chunk = ChunkRecord(0, "c", "d", 0, "T", "text", {}, {NODE_KEY: value}, (), "", ())
        assert node_of(chunk, "T").metadata == {NODE_KEY: value, "title": "T"}


ONE_OF_EACH: list[BaseNode] = [
    *(node(f"odd-{i}", text, "odd", metadata={"n": i, "same": [1, {"a": None}]}) for i, text in enumerate(ODD_TEXTS)),
    node("dated", "The dated one.", "d", metadata={"when": datetime.datetime(2026, 1, 2), "pair": (1, 2)}),
    node("alone", "Of no document.", metadata={"_node": "mine"}),
    node("index", "An index.", "e", IndexNode, index_id="other", metadata={"a": 1}),
    node("image", "An image.", "e", ImageNode, image_url="http://localhost/a.png", metadata={"a": True}),
    Node(id_="node", text_resource=MediaResource(text="A node.", mimetype="text/plain"), metadata={"a": 1.0}),
    LlamaDocument(id_="document", text="A document used as a node.", metadata={"file": "a.txt"}),
]


def test_through_a_store(open_tiny: OpenTiny) -> None:
    cache = open_tiny()
    cache.index_nodes(ONE_OF_EACH)
    again = {it.node_id: it for it in nodes_in(open_tiny())}
    assert again.keys() == {it.node_id for it in ONE_OF_EACH}
    for before in ONE_OF_EACH:
        after = again[before.node_id]
        if before.node_id != "dated":
            assert_same(after, before)
        for shown in (before, after):
            for id in (before.node_id, "another id"):
                found = cache.answering.find_chunk(id, "", shown.get_content(), 0.5, prompt_text(shown))
                assert found.chunk_id == id
                assert [it.states is not None for it in found.encodings] == [True]
    assert cache.index_nodes(again.values()).unchanged == len(cache.store.catalog.signatures())


def test_states_are_found_by_what_the_language_model_reads(open_tiny: OpenTiny) -> None:
    cache = open_tiny()
    before = node("n", "The ferry leaves.", "d", metadata={"title": "T", "secret": 1, "page": 2},
                  excluded_llm_metadata_keys=["secret"])  # fmt: skip
    cache.index_nodes([before])

    def is_found(**changes: Any) -> bool:
        it = before.model_copy(update=changes)
        return bool(cache.answering.find_chunk(it.node_id, "T", it.text, 1.0, prompt_text(it)).encodings)

    assert is_found()
    assert is_found(metadata=before.metadata | {"secret": 2})
    assert is_found(metadata={"title": "T", "page": 2})
    assert not is_found(metadata=before.metadata | {"page": 3})
    assert not is_found(metadata={"page": 2, "title": "T"})
    assert not is_found(text="The ferry leaves!")
    assert not is_found(excluded_llm_metadata_keys=[])


@pytest.mark.parametrize("title", ["Harbour", " Harbour {0} \n", "", "  ", "<|im_end|>", "long " * 60])
def test_a_chunk_of_a_text_reads_as_it_was_encoded(open_tiny: OpenTiny, title: str) -> None:
    cache = open_tiny()
    text = "\n\n ".join(f"{make_document(i).text}\n\n\n" for i in range(3))
    cache.index([Document("doc", f"\n {text} ", title, {"title": "mine", "n": 1})])
    for chunk, it in zip(chunks(cache), nodes_in(cache), strict=True):
        assert cache.template.passage(prompt_text(it)) == chunk.token_ids
        assert it.get_content() == chunk.text
        assert it.metadata == {"title": title or "doc", "n": 1}
        assert (it.node_id, it.ref_doc_id) == (chunk.chunk_id, "doc")


def three(document: str = "d", count: int = 3) -> list[TextNode]:
    return [node(f"{document}-{i}", f"Sentence {i} of {document}.", document, metadata={"i": i}) for i in range(count)]


def test_nodes_of_a_document_replace_it_as_a_whole(open_tiny: OpenTiny) -> None:
    cache = open_tiny()
    first = cache.index_nodes([*three(), *three("e"), node("blank", " \n", "d"), node("blank too", "", "f")])
    assert (outcome(first), first.chunks) == ((2, 0, 0, 0), 6)
    assert first.encoded_tokens > 0
    again = cache.index_nodes([*three(), *three("e")])
    assert (outcome(again), again.chunks, again.encoded_tokens) == ((0, 0, 2, 0), 0, 0)
    fewer = cache.index_nodes(three()[:2])
    assert (outcome(fewer), fewer.encoded_tokens) == ((0, 1, 0, 0), 0)
    assert {name: [*its] for name, its in stored(cache).items()} == {"d": ["d-0", "d-1"], "e": ["e-0", "e-1", "e-2"]}
    edited = cache.index_nodes([three()[1], node("d-0", "Edited.", "d")])
    assert edited.encoded_tokens == len(cache.template.passage("Edited."))
    assert stored(cache)["d"] == {"d-1": "Sentence 1 of d.", "d-0": "Edited."}
    with pytest.raises(SourceError, match="no documents"):
        cache.index_nodes([node("blank", " ", "d")])
    assert cache.index_nodes(three("e"), remove_missing=True).removed == 1
    assert [*stored(cache)] == ["e"]


def test_nodes_of_new_ids_are_not_encoded_again(open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = open_tiny()
    cache.index_nodes(three())

    def encode(self: StateEncoder, *arguments: object) -> None:
        pytest.fail("something was encoded")

    monkeypatch.setattr(StateEncoder, "encode", encode)
    renamed = [it.model_copy(update={"id_": str(uuid.uuid4())}) for it in three()]
    assert cache.index_nodes(renamed).encoded_tokens == 0
    assert [*stored(cache)["d"]] == [it.node_id for it in renamed]
    answer = cache.query("Which sentence?", top_k=3)
    assert not answer.misses
    assert {source.chunk_id for source in answer.sources} == {it.node_id for it in renamed}


def test_amending_leaves_what_else_a_document_has(open_tiny: OpenTiny) -> None:
    cache = open_tiny()
    assert outcome(cache.index_nodes(three()[:2], amend=True)) == (1, 0, 0, 0)
    report = cache.index_nodes([node("d-0", "Edited.", "d"), three()[2]], amend=True)
    assert report.encoded_tokens == sum(len(cache.template.passage(it)) for it in ("Edited.", prompt_text(three()[2])))
    assert stored(cache)["d"] == {"d-0": "Edited.", "d-1": "Sentence 1 of d.", "d-2": "Sentence 2 of d."}
    for _ in range(2):
        again = cache.index_nodes([three()[1]], amend=True)
        assert (outcome(again), again.encoded_tokens) == ((0, 0, 1, 0), 0)
    # One without text takes the old one out, whatever document it says it is of.
    assert outcome(cache.index_nodes([node("d-1", " ", "x"), *three("e", 1)], amend=True)) == (1, 1, 0, 0)
    assert {name: [*its] for name, its in stored(cache).items()} == {"d": ["d-0", "d-2"], "e": ["e-0"]}
    cache.index_nodes([node("d-0", "", "d"), node("d-2", "", "d"), node("e-0", "Edited.", "e")], amend=True)
    assert stored(cache) == {"e": {"e-0": "Edited."}}
    assert [*cache.store.catalog.signatures()] == ["e"]


@pytest.mark.parametrize("amend", [False, True])
def test_indexing_and_amending_the_same_changes_nothing(open_tiny: OpenTiny, amend: bool) -> None:
    cache = open_tiny()
    cache.index_nodes(ONE_OF_EACH, amend=amend)
    version = cache.store.catalog.vectors()
    for other in (amend, not amend, amend):
        report = cache.index_nodes(ONE_OF_EACH, amend=other)
        assert (report.added, report.updated) == (0, 0)
    assert cache.store.catalog.vectors() == version


@pytest.mark.parametrize("amend", [False, True])
@pytest.mark.parametrize("shard_bytes", [1, 10**9])
def test_a_node_may_come_to_be_of_another_document(
    open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch, amend: bool, shard_bytes: int
) -> None:
    """Also where there is a commit for every document."""
    monkeypatch.setattr("ragcache.indexer.job.COMMIT_CHUNKS", 1 if shard_bytes == 1 else 10**6)
    cache = open_tiny()
    cache.index_nodes([*three("a"), *three("z", 1)])
    moved = [node("a-1", "Sentence 1 of a.", "m", metadata={"i": 1}), node("z-0", "Of m by now.", "m")]
    cache.index_nodes(moved if amend else [*moved, three("a")[0], three("a")[2]], amend=amend, remove_missing=not amend)
    assert {name: [*its] for name, its in stored(cache).items()} == {"m": ["a-1", "z-0"], "a": ["a-0", "a-2"]}
    assert stored(cache)["m"]["z-0"] == "Of m by now."
    assert [*cache.store.catalog.signatures()] in (["a", "m"], ["m", "a"])
    assert {hit.chunk.chunk_id for hit in cache.retrieve("Sentence", 9)} == {"a-0", "a-1", "a-2", "z-0"}
    assert not cache.verify().faults
    # Each takes one of the other's.
    exchanged = [node("a-0", "Of m.", "m"), node("a-2", "Of m.", "m"), node("z-0", "Of a.", "a")]
    cache.index_nodes(exchanged, amend=True)
    assert {name: {*its} for name, its in stored(cache).items()} == {"m": {"a-0", "a-1", "a-2"}, "a": {"z-0"}}
    cache.index_nodes([node("z-0", "Of m.", "m"), node("a-0", "Of a.", "a")], amend=True)
    assert {name: {*its} for name, its in stored(cache).items()} == {"m": {"z-0", "a-1", "a-2"}, "a": {"a-0"}}
    with pytest.raises(SourceError, match="'a-0' of document 'other' is in the store already"):
        cache.index_nodes([node("a-0", "Of another.", "other")])


def test_nodes_of_a_document_that_was_indexed_as_text(open_tiny: OpenTiny) -> None:
    cache = open_tiny()
    document = make_document(1)
    cache.index([document])
    before = {it.chunk_id: it for it in chunks(cache)}
    extra = node("note", "A note by hand.", document.id, metadata={"number": 1})
    report = cache.index_nodes([extra], amend=True)
    assert report.encoded_tokens == len(cache.template.passage(prompt_text(extra)))
    after = {it.chunk_id: it for it in chunks(cache)}
    assert [*after] == [*before, "note"]
    for id, chunk in before.items():
        assert (after[id].text, after[id].token_ids, after[id].title) == (chunk.text, chunk.token_ids, chunk.title)
        assert after[id].metadata.items() >= chunk.metadata.items()
        assert after[id].embedded == chunk.embedded
    assert cache.store.catalog.documents_where({"number": 1}) == [document.id]
    # The text takes its document back, and nodes take it whole.
    assert cache.index([document]).updated == 1
    assert {it.chunk_id: (it.text, it.metadata) for it in chunks(cache)} == {
        it.chunk_id: (it.text, it.metadata) for it in before.values()
    }
    cache.index_nodes([extra])
    assert stored(cache) == {document.id: {"note": "A note by hand."}}


def test_deleting_nodes(open_tiny: OpenTiny) -> None:
    cache = open_tiny()
    cache.index_nodes([*three(), *three("e", 2), node("alone", "Of no document.")])
    cache.index([make_document(1)])
    version = cache.store.catalog.vectors()
    cache.delete_nodes([])
    cache.delete_nodes(["nobody", "d"])
    assert cache.store.catalog.vectors() == version
    first = next(it.chunk_id for it in chunks(cache) if it.document_id == "doc-1")
    kept = {it.chunk_id: prompt_text(one) for it, one in zip(chunks(cache), nodes_in(cache), strict=True)}
    gone = ["d-1", "e-0", "e-1", "alone", first, "nobody"]
    cache.delete_nodes(gone)
    assert [*cache.store.catalog.signatures()] in (["d", "doc-1"], ["doc-1", "d"])
    after = {it.node_id: prompt_text(it) for it in nodes_in(cache)}
    assert after == {id: text for id, text in kept.items() if id not in gone}
    assert {hit.chunk.chunk_id for hit in cache.retrieve("Sentence", 99)} == after.keys()
    answer = cache.query("Which ships passed?", top_k=20)
    assert not answer.misses
    assert not cache.verify().faults


def test_threads_and_processes_that_amend_one_document_lose_nothing(open_tiny: OpenTiny) -> None:
    """A store opened twice is to the lock what two processes are."""
    caches = [open_tiny(), open_tiny()]
    batches = [[node(f"{t}-{i}", f"Sentence {i} of thread {t}.", "d") for i in range(3)] for t in range(4)]
    failures: list[BaseException] = []
    done = threading.Event()

    def amend(number: int) -> None:
        for it in batches[number]:
            caches[number % 2].index_nodes([it], amend=True, wait=True)

    def ask() -> None:
        while not done.is_set():
            try:
                for cache in caches:
                    if cache._store is not None:
                        hits = cache.retrieve("Sentence of a thread", 20)
                        assert all(f"Sentence {it.chunk.chunk_id[-1]}" in it.chunk.text for it in hits)
            except BaseException as error:  # noqa: BLE001  # reported below, in the main thread
                failures.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(amend, range(4)))
    done.set()
    asking.join()
    assert not failures
    expected = {it.node_id: it.text for batch in batches for it in batch}
    assert stored(caches[0])["d"] == stored(caches[1])["d"] == expected
    assert not caches[0].query("Sentence", top_k=20).misses


def overtaken(cache: RagCache, monkeypatch: pytest.MonkeyPatch, other: Callable[[], object]) -> None:
    """Let something else be done after a call has looked at the store, and before it holds the lock."""
    index = cache.index

    def late(*arguments: Any, **options: Any) -> IndexReport:
        monkeypatch.undo()
        other()
        return index(*arguments, **options)

    monkeypatch.setattr(cache, "index", late)


def test_a_node_that_is_put_in_while_the_others_are_deleted_stays(
    open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, other = open_tiny(), open_tiny()
    cache.index_nodes(three("d", 1))
    overtaken(cache, monkeypatch, lambda: other.index_nodes([three()[1]], amend=True))
    cache.delete_nodes(["d-0"])
    assert stored(cache) == {"d": {"d-1": "Sentence 1 of d."}}
    overtaken(cache, monkeypatch, lambda: other.delete_nodes(["d-1"]))
    cache.index_nodes([three()[2]], amend=True)
    assert stored(cache) == {"d": {"d-2": "Sentence 2 of d."}}
    overtaken(cache, monkeypatch, lambda: other.delete_nodes(["d-2"]))
    cache.delete_nodes(["d-2"])
    assert cache.store.catalog.signatures() == {}


def test_amending_a_store_that_another_has_just_made(open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, other = open_tiny(), open_tiny()
    overtaken(cache, monkeypatch, lambda: other.index_nodes([three()[0]], amend=True))
    cache.index_nodes([three()[1]], amend=True)
    assert [*stored(cache)["d"]] == ["d-0", "d-1"]


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(nodes_of_documents(), min_size=1, max_size=3))
def test_any_nodes_through_a_store(open_tiny: OpenTiny, tmp_path: Path, batches: Sequence[list[BaseNode]]) -> None:
    cache = open_tiny(path=tmp_path / uuid.uuid4().hex)
    expected: dict[str, BaseNode] = {}
    for nodes in batches:
        cache.index_nodes(nodes, amend=True)
        expected |= {it.node_id: it for it in nodes}
        found = {it.node_id: it for it in nodes_in(cache)}
        assert found.keys() == expected.keys()
        for id, before in expected.items():
            assert_same(found[id], before)
    assert cache.index_nodes(expected.values(), amend=True).updated == 0
