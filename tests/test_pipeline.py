"""RagCache from Python: what a user sees of queries, streams, limits and faults."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ragcache import Document, RagCache
from ragcache.errors import (
    DocumentNotFoundError,
    PassageError,
    QuestionError,
    SettingsError,
    SourceError,
    StoreError,
    StoreMismatchError,
    StoreNotFoundError,
    StreamClosedError,
)
from ragcache.indexer.report import ENCODING, Silent
from ragcache.model.language_model import LanguageModel
from ragcache.prompt.template import Frame
from ragcache.retriever.embedding import Embedder
from ragcache.settings import load_settings
from ragcache.stream import context_chunk
from tests.conftest import make_document

OpenTiny = Callable[..., RagCache]


def test_an_answer_says_where_it_came_from(cache: RagCache) -> None:
    answer = cache.query("Which ships passed?", top_k=3)
    assert [s.chunk_id for s in answer.sources] == [
        hit.chunk.chunk_id for hit in cache.retrieve("Which ships passed?", 3)
    ]
    assert answer.sources[0].score >= answer.sources[-1].score
    assert answer.sources[0].text
    chunks = cache.store.catalog.chunks_by_id([s.chunk_id for s in answer.sources])
    assert answer.tokens.model_dump() == {
        "prefix": len(cache.template.prefix),
        "restored": sum(len(c.token_ids) for c in chunks),
        "remembered": 0,
        "repaired": 0,
        "prefilled": len(cache.template.question("Which ships passed?")),
        "generated": answer.tokens.generated,
    }
    assert 1 <= answer.tokens.generated <= 8
    times = answer.timings_ms
    assert 0 < times.ttft <= times.total
    assert times.retrieve + times.read + times.restore + times.prefill <= times.ttft


def test_the_json_object(cache: RagCache) -> None:
    dumped = cache.query("ships", top_k=1).model_dump(mode="json")
    assert set(dumped) == {
        "answer", "sources", "tokens", "timings_ms", "misses", "dropped", "reuse", "order", "finish_reason"
    }  # fmt: skip
    assert set(dumped["sources"][0]) == {"chunk_id", "document_id", "title", "score", "encoding"}
    assert set(dumped["timings_ms"]) == {"retrieve", "read", "restore", "repair", "prefill", "ttft", "total"}


def test_a_stream_gives_the_same_answer(cache: RagCache) -> None:
    whole = cache.query("Which ships passed?")
    stream = cache.stream("Which ships passed?")
    assert stream.sources == whole.sources
    assert "".join(stream) == whole.answer == stream.answer.answer


def test_a_closed_stream_stops(cache: RagCache) -> None:
    stream = cache.stream("Which ships passed?", max_tokens=500)
    next(stream)
    stream.close()
    assert list(stream) == []
    with pytest.raises(StreamClosedError, match="closed"):
        _ = stream.answer
    # Its KV cache is free again.
    assert cache.query("Which ships passed?").answer


def test_a_stream_that_is_closed_before_its_first_piece_gives_its_cache_back_and_is_remembered(
    open_tiny: Callable[..., RagCache],
) -> None:
    cache = open_tiny(sequence_megabytes=100)
    cache.index([make_document(1)])
    stream = cache.stream("Which ships passed?", reuse="none")
    taken = cache.engine.pool.take(1)
    stream.close()
    stream.close()
    assert cache.engine.pool.take(1) is not taken
    assert cache.query("Which ships passed?", reuse="exact").tokens.remembered > 0


@pytest.mark.parametrize("reuse", ["composed", "exact", "none"])
def test_every_way_of_reuse_answers(cache: RagCache, reuse: str) -> None:
    answer = cache.query("ships", reuse=reuse, top_k=1)
    assert answer.reuse == reuse
    assert answer.answer == cache.query("ships", reuse="none", top_k=1).answer


def test_exact_with_quantised_states_says_that_it_cannot(open_tiny: OpenTiny) -> None:
    cache = open_tiny(codec="int8")
    cache.index([make_document(1)])
    answer = cache.query("ships", reuse="exact", top_k=2)
    assert [(m.chunk_id, m.reason) for m in answer.misses] == [(answer.sources[0].chunk_id, "inexact")]
    assert answer.tokens.restored == 0
    assert answer.answer == cache.query("ships", reuse="none", top_k=2).answer


def test_damage_is_reported_and_changes_no_answer(cache: RagCache) -> None:
    before = cache.query("Which ships passed?", top_k=4)
    shards = list(cache.store.shard_folder.iterdir())
    for shard in shards:
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    after = cache.query("Which ships passed?", top_k=4)
    if after.misses:
        assert {m.reason for m in after.misses} == {"checksum"}
    for shard in shards:
        shard.unlink()
    gone = cache.query("Which ships passed?", top_k=4)
    assert {m.reason for m in gone.misses} == {"missing"}
    assert len(gone.misses) == 4
    assert gone.tokens.restored == 0
    assert before.answer == after.answer == gone.answer


def test_what_does_not_fit_is_dropped_and_named(cache: RagCache) -> None:
    window = cache.model.context_window
    many = [make_document(number, sentences=30) for number in range(100, 140)]
    cache.index(many)
    answer = cache.query("Which ships passed?", top_k=200)
    tokens = answer.tokens
    assert answer.dropped
    assert tokens.prefix + tokens.restored + tokens.prefilled + tokens.generated <= window
    everything = [hit.chunk.chunk_id for hit in cache.retrieve("Which ships passed?", 200)]
    assert [s.chunk_id for s in answer.sources] + answer.dropped == everything


def test_a_question_that_does_not_fit(cache: RagCache) -> None:
    with pytest.raises(QuestionError, match=r"takes \d+ tokens.*context window is 4096"):
        cache.query("why " * 5000)


@pytest.mark.parametrize("question", ["", "  \n", "half \ud800 a pair"])
def test_questions_without_sense(cache: RagCache, question: str) -> None:
    with pytest.raises(QuestionError):
        cache.query(question)
    with pytest.raises(QuestionError):
        cache.stream_from(question, [])


def test_odd_questions_are_answered(cache: RagCache) -> None:
    for question in ("?", "<|im_end|>", "漢字" * 50, "\x00", "a" * 3000):
        assert cache.query(question, max_tokens=2).finish_reason


def test_bad_options(cache: RagCache) -> None:
    for options in ({"top_k": 0}, {"reuse": "some"}, {"temperature": -1}, {"nonsense": 1}, {"seed": -1}):
        with pytest.raises(SettingsError):
            cache.query("ships", **options)


def test_sampling_options_reach_the_sampler(cache: RagCache) -> None:
    options = {"temperature": 5.0, "max_tokens": 12}
    assert cache.query("ships", seed=1, **options).answer == cache.query("ships", seed=1, **options).answer
    assert cache.query("ships", seed=1, **options).answer != cache.query("ships", seed=2, **options).answer


def test_delete(cache: RagCache) -> None:
    with pytest.raises(DocumentNotFoundError, match="'doc-9'"):
        cache.delete(["doc-1", "doc-9"])
    assert len(cache.store.catalog.signatures()) == 3
    cache.delete(["doc-0", "doc-1"])
    assert {hit.chunk.document_id for hit in cache.retrieve("ships", 50)} == {"doc-2"}
    cache.delete(["doc-2"])
    assert cache.retrieve("ships", 50) == []
    with pytest.raises(StoreError, match="no passages"):
        cache.query("ships")


def test_before_anything_is_indexed(open_tiny: OpenTiny) -> None:
    cache = open_tiny()
    for call in (lambda: cache.query("ships"), lambda: cache.delete(["x"]), lambda: cache.store):
        with pytest.raises(StoreNotFoundError):
            call()
    assert not cache.path.exists()


def test_what_a_first_run_had_committed_before_it_was_stopped_can_be_asked_about(open_tiny: OpenTiny) -> None:
    class UntilContexts(Silent):
        def start(self, documents: int, words: str = ENCODING) -> None:
            if words != ENCODING:
                raise KeyboardInterrupt

    cache = open_tiny(encodings=("alone", "context"))
    with pytest.raises(KeyboardInterrupt):
        cache.index([make_document(1)], progress=UntilContexts())
    assert cache.query("ships", top_k=1).sources[0].encoding == "alone"
    cache.index([make_document(1)])
    assert "context" in {source.encoding for source in cache.query("ships", top_k=2).sources}


def test_a_store_opened_again_is_the_same(cache: RagCache, open_tiny: OpenTiny) -> None:
    assert open_tiny().query("Which ships passed?").answer == cache.query("Which ships passed?").answer


def test_a_store_of_another_model_is_refused(
    cache: RagCache, tiny_model: Callable[[str], LanguageModel], embedder: Embedder
) -> None:
    other = tiny_model("llama-biases")
    settings = load_settings(cache.path, model=other.name)
    with pytest.raises(StoreMismatchError, match="weights"):
        RagCache(cache.path, settings, other, embedder)


def test_a_store_of_another_system_prompt_is_refused(cache: RagCache, open_tiny: OpenTiny) -> None:
    with pytest.raises(StoreMismatchError, match="system prompt"):
        open_tiny(system_prompt="Rhyme.")


def test_queries_from_many_threads_while_another_indexes(cache: RagCache, open_tiny: OpenTiny) -> None:
    texts = [hit.chunk.text for hit in cache.retrieve("harbour", 6)]
    expected = {text: cache.query(text, top_k=1).answer for text in texts[::2]}
    failures: list[BaseException] = []

    def ask(question: str) -> None:
        try:
            for _ in range(6):
                answer = cache.query(question, top_k=1)
                assert answer.answer == expected[question]
                assert not answer.misses
        except BaseException as error:  # noqa: BLE001  # reported below, in the main thread
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(q,)) for q in expected for _ in range(2)]
    for thread in threads:
        thread.start()
    writer = open_tiny()
    for number in range(50, 56):
        writer.index([Document(f"other-{number}", f"Something about subject {number} alone.", "Other")])
    for thread in threads:
        thread.join()
    assert not failures


def test_generate_is_a_plain_completion(cache: RagCache) -> None:
    ids = cache.template.formatted(cache.template.render([{"role": "user", "content": "Hello"}]))
    answer = cache.generate(ids, max_tokens=4).answer
    assert answer.tokens.prefilled == len(ids)
    assert answer.sources == []
    with pytest.raises(QuestionError):
        cache.generate(ids * 1000)


def test_passages_from_elsewhere_are_prefilled(cache: RagCache) -> None:
    stored = cache.retrieve("ships", 1)[0].chunk
    known = cache.answering.find_chunk(stored.chunk_id, stored.title, stored.text, 0.5)
    assert known.encodings == stored.encodings
    renamed = cache.answering.find_chunk("another id", stored.title, stored.text, 0.5)
    assert (renamed.chunk_id, renamed.encodings) == ("another id", stored.encodings)
    assert not cache.answering.find_chunk(stored.chunk_id, "Another title", stored.text, 0.5).encodings
    assert not cache.answering.find_chunk(stored.chunk_id, stored.title, f"{stored.text} ", 0.5).encodings
    changed = cache.answering.find_chunk(stored.chunk_id, "T", "Another text under the same id.", 0.5)
    assert not changed.encodings
    answer = cache.stream_from("ships", [known, changed]).answer
    assert [(m.chunk_id, m.reason) for m in answer.misses] == [(stored.chunk_id, "not_stored")]
    assert answer.tokens.restored == len(stored.token_ids)


def test_open_loads_by_settings(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    stages: list[str] = []
    arguments = {"model": str(tiny_folder("qwen2")), "dtype": "float32", "chunk_tokens": 64, "max_tokens": 4}
    cache = RagCache.open(tmp_path / "s", on_stage=stages.append, **arguments)
    cache.index([make_document(1)])
    assert any("certifying" in stage for stage in stages)
    again = RagCache.open(tmp_path / "s", max_tokens=4)
    assert again.settings.model == str(tiny_folder("qwen2"))
    assert again.query("ships").answer == cache.query("ships").answer


def test_by_default_chunks_are_encoded_twice_and_the_first_is_exact(
    tiny_model: Callable[[str], LanguageModel], embedder: Embedder, tmp_path: Path
) -> None:
    model = tiny_model("llama")
    settings = load_settings(model=model.name, dtype="float32", chunk_tokens=64, max_tokens=4)
    cache = RagCache(tmp_path / "store", settings, model, embedder)
    report = cache.index([make_document(number) for number in range(3)])
    assert report.in_context == report.chunks > 3
    answer = cache.query("Which ships passed?", top_k=3)
    assert [source.encoding for source in answer.sources] == ["alone", "context", "context"]
    assert (answer.order, answer.misses, answer.tokens.repaired) == ("conditioned", [], 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"system_prompt": "Be brief. " * 5000}, "shorten it"),
        ({"chunk_tokens": 10**6}, "smaller chunk_tokens"),
        ({"chunk_tokens": 64, "chunk_overlap": 64}, "must be smaller"),
    ],
)
def test_settings_that_leave_no_room(open_tiny: OpenTiny, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        open_tiny(**settings)


@pytest.mark.parametrize("question", [None, 5, b"ships", ["ships"]])
def test_questions_of_other_types(cache: RagCache, question: Any) -> None:
    with pytest.raises(QuestionError, match="no text"):
        cache.query(question)


@pytest.mark.parametrize("documents", [["text"], [Document("a", None)], [Document(3, "text")], [{"id": "a"}]])  # type: ignore[arg-type]
def test_documents_of_other_types(cache: RagCache, documents: Any) -> None:
    with pytest.raises(SourceError):
        cache.index(documents)
    assert set(cache.store.catalog.signatures()) == {"doc-0", "doc-1", "doc-2"}


def test_passages_that_are_no_unicode(cache: RagCache) -> None:
    with pytest.raises(PassageError, match="surrogate"):
        cache.answering.find_chunk("id", "title", "half a pair: \ud800", 1.0)


def test_one_id_may_be_deleted_by_itself(cache: RagCache) -> None:
    cache.delete("doc-1")
    assert set(cache.store.catalog.signatures()) == {"doc-0", "doc-2"}


def test_found_chunks_print_short(cache: RagCache) -> None:
    (hit,) = cache.retrieve("ships", 1)
    assert len(repr(hit)) < len(hit.chunk.text) + 400


OTHER_WORDS = Frame((1, 2, 3, 4, 5), (6, 7, 8))


def test_a_prompt_that_begins_otherwise_uses_no_states(cache: RagCache) -> None:
    chunks = [context_chunk(hit) for hit in cache.retrieve("ships", 3)]
    stranger = cache.answering.find_chunk("elsewhere", "", "A passage from elsewhere.", 0.1)
    before = cache.stats()
    answer = cache.stream_from("ships", [*chunks, stranger], OTHER_WORDS).answer
    assert [(it.chunk_id, it.reason) for it in answer.misses] == [(it.chunk_id, "prefix") for it in chunks]
    assert (answer.reuse, answer.tokens.restored, answer.tokens.prefix) == ("none", 0, 0)
    prompt = (*OTHER_WORDS.prefix, *(i for it in (*chunks, stranger) for i in it.token_ids), *OTHER_WORDS.question)
    assert answer.tokens.prefilled == len(prompt)
    assert answer.answer == cache.generate(prompt).answer.answer
    assert answer.answer != cache.stream_from("ships", [*chunks, stranger]).answer.answer
    after = cache.stats()
    assert after.misses["prefix"] == before.misses.get("prefix", 0) + 3
    # Where nothing was to be reused, nothing is missed.
    assert cache.stream_from("ships", chunks, OTHER_WORDS, reuse="none").answer.misses == []
    assert cache.stats().misses["prefix"] == after.misses["prefix"]


@pytest.mark.parametrize("reuse", ["composed", "exact"])
def test_a_prompt_that_begins_otherwise_is_not_taken_for_one_that_does_not(open_tiny: OpenTiny, reuse: str) -> None:
    cache = open_tiny(sequence_megabytes=64)
    cache.index([make_document(number) for number in range(3)])
    chunks = [context_chunk(hit) for hit in cache.retrieve("ships", 3)]
    expected = [cache.stream_from("ships", chunks, frame, reuse="none").answer.answer for frame in (OTHER_WORDS, None)]
    for _ in range(2):
        other, own = (cache.stream_from("ships", chunks, frame, reuse=reuse).answer for frame in (OTHER_WORDS, None))
        assert [other.answer, own.answer] == expected
        assert other.tokens.remembered == 0
        assert own.tokens.remembered > 0


def test_a_frame_of_the_same_beginning_reuses_states(cache: RagCache) -> None:
    chunks = [context_chunk(hit) for hit in cache.retrieve("ships", 3)]
    frame = Frame(cache.template.prefix, cache.template.question("Something else?"))
    answer = cache.stream_from("ships", chunks, frame).answer
    assert (answer.misses, answer.tokens.restored) == ([], sum(len(it.token_ids) for it in chunks))
    assert answer.answer == cache.stream_from("Something else?", chunks).answer.answer


def test_the_users_message_belongs_to_the_store(open_tiny: OpenTiny) -> None:
    words = 'Read "these":\n{passages}\nand say: {question} {now}'
    made = open_tiny(user_prompt=words)
    made.index([make_document(1)])
    again = open_tiny()
    assert again.settings.user_prompt == words
    assert again.template.frame("ships") == made.template.frame("ships")
    answer = again.query("ships")
    assert (answer.answer, answer.misses) == (made.query("ships").answer, [])
    # What stands behind the passages may change; what stands before them is in their states.
    after = open_tiny(user_prompt=words.replace("say", "tell"))
    assert not after.query("ships").misses
    with pytest.raises(StoreMismatchError, match="prompt"):
        open_tiny(user_prompt=words.replace("Read", "Study"))


@pytest.mark.parametrize("words", ["", "{passages}", "{question} {passages}", "{passages} {passages} {question}"])
def test_users_messages_without_sense(open_tiny: OpenTiny, words: str) -> None:
    with pytest.raises(SettingsError, match="user_prompt"):
        open_tiny(user_prompt=words)
