"""Chunks get the encodings that are asked for, after text that is in the store, and only when that has changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragcache import Document, RagCache
from ragcache.errors import EncodingError
from ragcache.indexer.contexts import Block, context_ids
from ragcache.indexer.encoder import StateEncoder
from ragcache.indexer.renewal import AFFECTED
from ragcache.maintenance import rebuild_store
from ragcache.model.certify import reference_kv, relative_error
from ragcache.retriever.vectors import VectorIndex, Vectors
from ragcache.states.key import context_digest, state_key
from ragcache.states.reading import read_states
from ragcache.states.records import ChunkRecord, Encoding
from ragcache.states.store import StateStore
from tests.conftest import make_document
from tests.indexer.test_encoder import kv_at

OpenTiny = Callable[..., RagCache]
BOTH: dict[str, Any] = {"encodings": ("alone", "context"), "contexts": 1}
ONLY: dict[str, Any] = {"encodings": ("context",), "contexts": 1}


def chunks_of(cache: RagCache) -> dict[str, ChunkRecord]:
    return {chunk.chunk_id: chunk for batch in cache.store.catalog.all_chunks() for chunk in batch}


def in_context(cache: RagCache) -> dict[str, Encoding]:
    """Encodings in context by chunk; every chunk has one."""
    found = {}
    for chunk_id, chunk in chunks_of(cache).items():
        encoding = chunk.encoding("context")
        assert encoding is not None
        found[chunk_id] = encoding
    return found


def check_whole(cache: RagCache) -> None:
    """Every chunk has states in a context that is made of other chunks of the store, each there once."""
    identity = cache.store.identity()
    for chunk in chunks_of(cache).values():
        encoding = chunk.encoding("context")
        assert encoding is not None
        assert encoding.states is not None
        members = cache.store.catalog.chunks_by_content(encoding.members)
        assert members.keys() == set(encoding.members) - {chunk.content}
        assert len(members) == len(encoding.members)
        contexts = [[members[it] for it in context] for context in encoding.contexts]
        assert encoding.context == context_digest(context_ids(contexts))
        key = state_key(identity.digest, identity.prefix, encoding.context, chunk.token_ids)
        assert encoding.key == encoding.states.key == key


ANIMALS = {
    "bees": "Bees make honey in a hive. The queen bee lays eggs, and the worker bees gather nectar.",
    "cats": "Cats sleep all day and hunt mice at night. A cat washes its fur with its tongue.",
    "steel": "Steel is an alloy of iron and carbon, made in a blast furnace.",
    "tax": "The tax office sends a letter in spring, and the tax is due in autumn.",
    "chess": "In chess a rook moves along ranks and files, and a bishop moves diagonally.",
}
HONEY = "Honey is made by bees in a hive; worker bees gather nectar, and the queen bee lays eggs."


def animals(*names: str) -> list[Document]:
    return [Document(name, ANIMALS[name]) for name in names or ANIMALS]


@pytest.mark.parametrize("context", ["document", "neighbours"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_states_are_those_of_a_prefill_of_prefix_context_and_chunk(
    open_tiny: OpenTiny, family: str, context: str
) -> None:
    cache = open_tiny(family=family, **BOTH, context=context, context_tokens=100)
    cache.index([make_document(1, 12), *animals("bees", "cats", "tax")])
    check_whole(cache)
    format, prefix = cache.engine.format, list(cache.template.prefix)
    for chunk in list(chunks_of(cache).values())[::2]:
        encoding = chunk.encoding("context")
        assert encoding is not None
        assert encoding.states is not None
        stored = read_states(encoding.states, encoding.context, chunk.token_ids)
        before = prefix + list(stored.context_ids)
        reference = reference_kv(cache.model, [*before, *chunk.token_ids], 0)
        tokens = len(chunk.token_ids)
        for layer, ours in kv_at(cache.model, format, stored.layers, tokens, len(before)).items():
            kept = min(tokens, (cache.model.decoder.layers[layer].window or tokens + 1) - 1)
            for part, theirs in zip(ours, reference[layer], strict=True):
                assert relative_error(part[:, -kept:], theirs[:, -kept:]) < 1e-4


def test_a_context_is_the_document_s_text_filled_up_with_what_is_like_it(open_tiny: OpenTiny) -> None:
    cache = open_tiny(**BOTH, context_tokens=60)
    cache.index([make_document(1, 10), *animals(), Document("honey", HONEY)])
    chunks = chunks_of(cache)
    for chunk_id, encoding in in_context(cache).items():
        chunk = chunks[chunk_id]
        if chunk.ordinal > 0:
            assert encoding.members[-1] == chunks[f"{chunk.document_id}#{chunk.ordinal - 1}"].content
    assert in_context(cache)["bees#0"].members[-1] == chunks["honey#0"].content
    assert in_context(cache)["honey#0"].members[-1] == chunks["bees#0"].content


def test_neighbours_may_be_of_the_same_document(open_tiny: OpenTiny) -> None:
    cache = open_tiny(**BOTH, context="neighbours", context_tokens=60)
    cache.index([make_document(1, 10), *animals()])
    chunks = {chunk.content: chunk for chunk in chunks_of(cache).values()}
    check_whole(cache)
    for chunk_id, encoding in in_context(cache).items():
        if chunk_id.startswith("doc-1#"):
            assert chunks[encoding.members[-1]].document_id == "doc-1"


def test_a_long_document_costs_little_more_than_its_tokens(open_tiny: OpenTiny) -> None:
    cache = open_tiny(**ONLY, context_tokens=100, batch_tokens=600)
    report = cache.index([make_document(1, 100)])
    check_whole(cache)
    chunks = chunks_of(cache).values()
    assert report.in_context == report.chunks == len(chunks) > 20
    assert report.encoded_tokens < 1.3 * cache.stats().tokens


def test_the_same_again_encodes_nothing(open_tiny: OpenTiny) -> None:
    cache = open_tiny(**BOTH)
    documents = [*animals(), Document("blank", " "), make_document(1)]
    first = cache.index(documents)
    assert first.in_context == first.chunks > 0
    version = cache.store.catalog.vectors()
    again = cache.index(documents)
    assert (again.in_context, again.encoded_tokens, again.unchanged) == (0, 0, len(documents))
    assert cache.store.catalog.vectors() == version


def test_a_growing_corpus_sets_off_no_avalanche(open_tiny: OpenTiny) -> None:
    cache = open_tiny(**BOTH)
    cache.index([make_document(number) for number in range(20)])
    renewed = 0
    for number in range(20, 24):
        before = in_context(cache)
        report = cache.index([make_document(number)])
        assert report.chunks <= report.in_context <= report.chunks * (1 + AFFECTED)
        changed = [name for name, encoding in in_context(cache).items() if before.get(name) != encoding]
        assert len(changed) == report.in_context
        renewed += report.in_context - report.chunks
    # All are much alike here, so none is much better than what was there.
    assert renewed == 0
    check_whole(cache)


def test_a_much_better_neighbour_takes_its_place(open_tiny: OpenTiny) -> None:
    cache = open_tiny(**BOTH, context_tokens=30)
    cache.index(animals())
    before = in_context(cache)
    assert cache.index([Document("honey", HONEY)]).in_context == 2
    after = in_context(cache)
    assert after["bees#0"].members[-1] == chunks_of(cache)["honey#0"].content
    assert {name for name in before if before[name] != after[name]} == {"bees#0"}
    assert cache.index([Document("honey", HONEY)]).in_context == 0


def test_the_first_document_gets_a_context_once_there_is_another(open_tiny: OpenTiny) -> None:
    cache = open_tiny(**BOTH)
    assert cache.index(animals("bees")).encoded_tokens == cache.stats().tokens
    assert in_context(cache)["bees#0"].members == ()
    assert cache.index(animals("cats")).in_context == 2
    assert len(in_context(cache)["bees#0"].members) == 1


def test_a_deleted_member_has_exactly_its_dependents_encoded_again(open_tiny: OpenTiny) -> None:
    cache = open_tiny(**BOTH, context_tokens=40)
    documents = [*animals(), Document("honey", HONEY), make_document(1, 10)]
    cache.index(documents)
    before, gone = in_context(cache), chunks_of(cache)["bees#0"].content
    dependents = {name for name, encoding in before.items() if gone in encoding.members}
    assert "honey#0" in dependents
    cache.delete(["bees"])
    report = cache.index([it for it in documents if it.id != "bees"])
    assert report.in_context == len(dependents)
    after = in_context(cache)
    assert {name for name in after if before[name] != after[name]} == dependents
    check_whole(cache)


def test_a_changed_document_keeps_the_contexts_that_are_as_they_were(open_tiny: OpenTiny) -> None:
    cache = open_tiny(**BOTH, context_tokens=60)
    document = make_document(1, 20)
    cache.index([document, *animals()])
    before = {chunk.content: chunk.encoding("context") for chunk in chunks_of(cache).values()}
    report = cache.index([replace(document, text=document.text + " And one more sentence at the end.")])
    check_whole(cache)
    kept = [chunk for chunk in chunks_of(cache).values() if chunk.encoding("context") == before.get(chunk.content)]
    assert 0 < report.in_context == len(chunks_of(cache)) - len(kept) < report.chunks / 2


def test_encodings_are_added_and_taken_away_without_making_the_others_again(open_tiny: OpenTiny) -> None:
    documents = [*animals(), make_document(1)]
    cache = open_tiny(encodings=("alone",))
    cache.index(documents)
    alone = {name: chunk.encodings for name, chunk in chunks_of(cache).items()}
    cache = open_tiny(**BOTH)
    report = cache.index(documents)
    assert (report.unchanged, report.in_context) == (len(documents), len(alone))
    both = {name: chunk.encodings for name, chunk in chunks_of(cache).items()}
    assert all(alone[name] == both[name][:1] for name in alone)

    cache = open_tiny(**ONLY)
    assert cache.index(documents).encoded_tokens == 0
    assert {name: chunk.encodings for name, chunk in chunks_of(cache).items()} == {
        name: encodings[1:] for name, encodings in both.items()
    }
    cache = open_tiny(**BOTH)
    report = cache.index(documents)
    assert (report.in_context, report.encoded_tokens) == (0, cache.stats().tokens)
    cache = open_tiny(encodings=("alone",))
    cache.index(documents)
    assert all([it.name for it in chunk.encodings] == ["alone"] for chunk in chunks_of(cache).values())
    assert not cache.query("Which ships passed?", top_k=5).misses


def test_another_recipe_chooses_all_contexts_anew(open_tiny: OpenTiny) -> None:
    documents = [*animals(), make_document(1)]
    open_tiny(**BOTH, context_tokens=40).index(documents)
    cache = open_tiny(**BOTH, context_tokens=200)
    before = in_context(cache)
    report = cache.index(documents)
    assert report.unchanged == len(documents)
    after = in_context(cache)
    assert report.in_context == sum(before[name] != after[name] for name in after) > 0
    assert cache.index(documents).in_context == 0
    check_whole(cache)
    version = cache.store.catalog.vectors()
    cache = open_tiny(**BOTH, context_tokens=201)
    assert cache.index(documents).in_context == 0
    assert (in_context(cache), cache.store.catalog.vectors()) == (after, version)


def interrupt_after(passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C does once so many passes are through."""
    left, encode = passes, StateEncoder.encode

    def interrupted(self: StateEncoder, blocks: list[Block[ChunkRecord]], *limit: int) -> object:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        return encode(self, blocks, *limit)

    monkeypatch.setattr(StateEncoder, "encode", interrupted)


@pytest.mark.parametrize("passes", [0, 1, 9])
def test_an_interrupted_run_is_gone_on_with(open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch, passes: int) -> None:
    """Nothing that was committed is encoded again."""
    documents = [make_document(number, 16) for number in range(12)]
    cache = open_tiny(**ONLY, context_tokens=60, batch_tokens=300, shard_megabytes=1)
    interrupt_after(passes, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        cache.index(documents)
    monkeypatch.undo()
    cache = open_tiny(**ONLY, context_tokens=60, batch_tokens=300, shard_megabytes=1)
    done = sum(chunk.encoding("context") is not None for chunk in chunks_of(cache).values())
    assert (done > 0) == (passes == 9)
    report = cache.index(documents)
    assert report.in_context == len(chunks_of(cache)) - done
    check_whole(cache)


def test_a_change_of_recipe_that_was_interrupted_is_undone_by_going_back(
    open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [make_document(number, 16) for number in range(12)]
    given = {**ONLY, "batch_tokens": 300, "shard_megabytes": 1}
    cache = open_tiny(**given, context_tokens=40)
    cache.index(documents)
    before = in_context(cache)
    interrupt_after(25, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        open_tiny(**given, context_tokens=120).index(documents)
    monkeypatch.undo()
    cache = open_tiny(**given, context_tokens=40)
    changed = sum(before[name] != encoding for name, encoding in in_context(cache).items())
    assert changed > 0
    assert cache.index(documents).in_context == changed
    assert {name: it.contexts for name, it in in_context(cache).items()} == {
        name: it.contexts for name, it in before.items()
    }


def test_a_rebuilt_catalog_knows_the_recipe(open_tiny: OpenTiny) -> None:
    documents = [*animals(), make_document(1)]
    cache = open_tiny(**BOTH, context_tokens=40)
    cache.index(documents)
    rebuild_store(cache.path, cache.settings, lambda: cache.embedder)
    assert open_tiny(**BOTH, context_tokens=40).index(documents).in_context == 0
    assert open_tiny(**BOTH, context_tokens=200).index(documents).in_context > 0


def test_contexts_that_a_small_corpus_had_no_text_for_are_made_once_there_is_some(open_tiny: OpenTiny) -> None:
    cache = open_tiny(encodings=("alone", "context"), context_tokens=40)
    for document in [*animals(), Document("honey", HONEY)]:
        cache.index([document])
    assert {len(it.contexts) for it in in_context(cache).values()} == {3}
    check_whole(cache)
    assert cache.index(animals()).in_context == 0


def test_contexts_of_many_short_chunks_take_few_searches(open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = open_tiny(encodings=("context",), context_tokens=200)
    searches, nearest = 0, VectorIndex.nearest

    def counted(self: VectorIndex, vectors: Vectors, count: int) -> list[list[tuple[int, float]]]:
        nonlocal searches
        searches += 1
        return nearest(self, vectors, count)

    monkeypatch.setattr(VectorIndex, "nearest", counted)
    cache.index([Document(f"fact-{number}", f"Fact {number} is true.") for number in range(60)])
    assert searches < 5
    assert {len(it.contexts) for it in in_context(cache).values()} == {3}


def test_vectors_are_not_written_again_with_contexts(open_tiny: OpenTiny) -> None:
    cache = open_tiny(encodings=("alone",))
    cache.index(animals())
    (before,) = [path.stat().st_ino for path in cache.store.vector_folder.iterdir()]
    cache = open_tiny(**BOTH)
    cache.index(animals())
    (after,) = [path.stat().st_ino for path in cache.store.vector_folder.iterdir()]
    assert after == before
    assert VectorIndex.load(cache.store.vector_folder, cache.store.catalog.vectors()).ids == {1, 2, 3, 4, 5}


def test_states_that_overflow_are_not_stored(open_tiny: OpenTiny) -> None:
    cache = open_tiny(**ONLY)
    norm = cache.model.module.get_submodule("model.layers.1.input_layernorm")
    handle = norm.register_forward_hook(lambda module, arguments, output: output * float("inf"))
    try:
        with pytest.raises(EncodingError, match="layer 1"):
            cache.index(animals())
    finally:
        handle.remove()


def test_a_rebuilt_catalog_knows_the_contexts(open_tiny: OpenTiny) -> None:
    cache = open_tiny(**BOTH)
    documents = [make_document(1, 20), *animals()]
    cache.index(documents)
    before = {name: chunk.encodings for name, chunk in chunks_of(cache).items()}
    report, _ = rebuild_store(cache.path, cache.settings, lambda: cache.embedder)
    assert not report.faults
    cache = open_tiny(**BOTH)
    assert {name: chunk.encodings for name, chunk in chunks_of(cache).items()} == before
    assert cache.index(documents).encoded_tokens == 0


def test_where_space_is_short_contexts_go_without_states(open_tiny: OpenTiny, tmp_path: Path) -> None:
    documents = [make_document(number, 16) for number in range(20)]
    short = open_tiny(**BOTH, budget_megabytes=2)
    report = short.index(documents)
    assert report.without_states > 0
    again = short.index(documents)
    assert (again.encoded_tokens, again.in_context) == (0, 0)
    assert set(in_context(short)) == set(chunks_of(short))
    roomy = open_tiny(**BOTH, budget_megabytes=200)
    assert roomy.index(documents).readmitted > 0
    check_whole(roomy)


def test_equal_chunks_share_states_in_equal_contexts(open_tiny: OpenTiny) -> None:
    cache = open_tiny(**ONLY, context="neighbours")
    report = cache.index([*animals(), Document("twin", ANIMALS["bees"], "bees")])
    encodings = in_context(cache)
    assert encodings["twin#0"].key == encodings["bees#0"].key
    assert report.in_context == len(encodings) - 1
    StateStore.open(cache.path)
    check_whole(cache)


@pytest.mark.parametrize("context", ["document", "neighbours"])
def test_by_default_states_are_the_mean_over_three_contexts(open_tiny: OpenTiny, context: str) -> None:
    several: dict[str, Any] = {"encodings": ("alone", "context"), "context": context, "context_tokens": 40}
    cache = open_tiny(**several)
    cache.index([make_document(1, 6), *animals(), Document("honey", HONEY)])
    check_whole(cache)
    before = in_context(cache)
    assert {len(it.contexts) for it in before.values()} == {3}
    report = cache.index([make_document(1, 6), *animals(), Document("honey", HONEY)])
    assert (report.in_context, report.encoded_tokens) == (0, 0)
    steel = chunks_of(cache)["steel#0"].content
    dependents = {name for name, encoding in before.items() if steel in encoding.members}
    assert dependents
    cache.delete("steel")
    report = cache.index([make_document(1, 6), *animals("bees", "cats", "tax", "chess"), Document("honey", HONEY)])
    assert report.in_context == len(dependents)
    after = in_context(cache)
    assert {name for name in after if before[name] != after[name]} == dependents
    check_whole(cache)
    rebuild_store(cache.path, cache.settings, lambda: cache.embedder)
    assert in_context(open_tiny(**several)) == after
