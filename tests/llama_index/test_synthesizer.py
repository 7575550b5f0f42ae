"""A LlamaIndex query engine whose answers come from stored states."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.llms.mock import MockLLM
from llama_index.core.postprocessor import MetadataReplacementPostProcessor, SimilarityPostprocessor
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate, PromptTemplate, RichPromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import (
    MetadataMode,
    NodeRelationship,
    NodeWithScore,
    QueryBundle,
    RelatedNodeInfo,
    TextNode,
)

from ragcache import RagCache
from ragcache.errors import QuestionError, SettingsError
from ragcache.llama_index import RagCacheLLM, RagCacheRetriever, RagCacheSynthesizer, prompt_settings
from ragcache.llama_index.prompts import default_template
from tests.conftest import make_document

QUESTION = "Which ships passed?"


@pytest.fixture
def llm(cache: RagCache) -> RagCacheLLM:
    return RagCacheLLM(cache)


def engine(cache: RagCache, llm: RagCacheLLM, **kwargs: object) -> RetrieverQueryEngine:
    streaming = bool(kwargs.pop("streaming", False))
    return RetrieverQueryEngine(
        retriever=RagCacheRetriever(cache, similarity_top_k=3),
        response_synthesizer=RagCacheSynthesizer(llm, streaming=streaming),
        **kwargs,  # type: ignore[arg-type]
    )


def test_answers_come_from_restored_states(cache: RagCache, llm: RagCacheLLM) -> None:
    response = engine(cache, llm).query(QUESTION)
    expected = cache.query(QUESTION, top_k=3)
    assert str(response) == expected.answer
    assert [node.node_id for node in response.source_nodes] == [s.chunk_id for s in expected.sources]
    assert response.metadata is not None
    assert response.metadata["ragcache"]["tokens"] == expected.tokens.model_dump()
    assert response.metadata["ragcache"]["misses"] == []
    assert response.source_nodes[0].metadata["number"] in (0, 1, 2)


def test_streaming(cache: RagCache, llm: RagCacheLLM) -> None:
    response = engine(cache, llm, streaming=True).query(QUESTION)
    assert isinstance(response, StreamingResponse)
    assert "".join(response.response_gen) == cache.query(QUESTION, top_k=3).answer


def test_async(cache: RagCache, llm: RagCacheLLM) -> None:
    async def ask() -> tuple[str, str]:
        whole = await engine(cache, llm).aquery(QUESTION)
        streamed = await engine(cache, llm, streaming=True).aquery(QUESTION)
        assert isinstance(streamed, AsyncStreamingResponse)
        return str(whole), "".join([piece async for piece in streamed.response_gen])

    whole, streamed = asyncio.run(ask())
    assert whole == streamed == cache.query(QUESTION, top_k=3).answer


def test_postprocessors_may_drop_and_reorder(cache: RagCache, llm: RagCacheLLM) -> None:
    nodes = RagCacheRetriever(cache, similarity_top_k=3).retrieve(QUESTION)
    cutoff = (nodes[0].score or 0) - 1e-6
    query_engine = engine(cache, llm, node_postprocessors=[SimilarityPostprocessor(similarity_cutoff=cutoff)])
    assert len(query_engine.query(QUESTION).source_nodes) == 1
    synthesizer = RagCacheSynthesizer(llm)
    backwards = synthesizer.synthesize(QUESTION, list(reversed(nodes)))
    assert backwards.metadata is not None
    assert [s["chunk_id"] for s in backwards.metadata["ragcache"]["sources"]] == [n.node_id for n in reversed(nodes)]
    assert backwards.metadata["ragcache"]["misses"] == []


def test_a_node_from_elsewhere_is_prefilled(cache: RagCache, llm: RagCacheLLM) -> None:
    nodes = RagCacheRetriever(cache, similarity_top_k=1).retrieve(QUESTION)
    stranger = NodeWithScore(node=TextNode(id_="elsewhere", text="The ferry Aurora passed at noon."), score=0.3)
    response = RagCacheSynthesizer(llm).synthesize(QueryBundle(QUESTION), [*nodes, stranger])
    assert response.metadata is not None
    report = response.metadata["ragcache"]
    assert [(m["chunk_id"], m["reason"]) for m in report["misses"]] == [("elsewhere", "not_stored")]
    assert report["tokens"]["restored"] > 0


def test_a_changed_node_of_a_known_id_is_not_served_from_old_states(cache: RagCache, llm: RagCacheLLM) -> None:
    (node,) = RagCacheRetriever(cache, similarity_top_k=1).retrieve(QUESTION)
    edited = NodeWithScore(node=TextNode(id_=node.node_id, text="Not a single ship passed."), score=1.0)
    response = RagCacheSynthesizer(llm).synthesize(QUESTION, [edited])
    assert response.metadata is not None
    assert response.metadata["ragcache"]["tokens"]["restored"] == 0


def test_no_nodes_is_llamaindex_own_empty_response(llm: RagCacheLLM) -> None:
    assert str(RagCacheSynthesizer(llm).synthesize(QUESTION, [])) == "Empty Response"


def test_bare_texts(llm: RagCacheLLM) -> None:
    assert RagCacheSynthesizer(llm).get_response(QUESTION, ["The ferry passed.", "The tug passed."])


def report(response: object) -> dict[str, Any]:
    assert isinstance(response, Response | StreamingResponse | AsyncStreamingResponse)
    found: dict[str, Any] = (response.metadata or {})["ragcache"]
    return found


class TestReports:
    def test_of_a_stream_once_it_is_read(self, cache: RagCache, llm: RagCacheLLM) -> None:
        response = engine(cache, llm, streaming=True).query(QUESTION)
        assert report(response) == {}
        text = str(response)
        assert report(response)["answer"] == text
        assert report(response)["tokens"]["restored"] > 0

    def test_of_an_async_stream(self, cache: RagCache, llm: RagCacheLLM) -> None:
        async def ask() -> tuple[str, dict[str, Any]]:
            response = await engine(cache, llm, streaming=True).aquery(QUESTION)
            assert isinstance(response, AsyncStreamingResponse)
            text = "".join([piece async for piece in response.response_gen])
            return text, report(response)

        text, found = asyncio.run(ask())
        assert found["answer"] == text


def test_the_order_and_options_are_the_llm_s(cache: RagCache) -> None:
    nodes = RagCacheRetriever(cache, similarity_top_k=3).retrieve(QUESTION)[::-1]
    ids = [scored.node_id for scored in nodes]
    synthesizer = RagCacheSynthesizer(RagCacheLLM(cache, order="score", max_tokens=2))
    found = report(synthesizer.synthesize(QUESTION, nodes))
    assert [source["chunk_id"] for source in found["sources"]] == ids[::-1]
    assert found["tokens"]["generated"] == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda llm: RagCacheSynthesizer(cast(RagCacheLLM, MockLLM())), "not with MockLLM"),
        (lambda llm: RagCacheSynthesizer(llm, output_cls=QueryBundle), "output_cls is not supported"),
        (lambda llm: RagCacheSynthesizer(llm, multimodal=True), "multimodal is not supported"),
        (lambda llm: RagCacheSynthesizer(llm, PromptTemplate("{query_str}")), "exactly once"),
        (lambda llm: RagCacheSynthesizer(llm, PromptTemplate("{context_str}{context_str}")), "exactly once"),
        (lambda llm: RagCacheSynthesizer(llm, RichPromptTemplate("{{ context_str.a.b }}")), "cannot be filled"),
    ],
)
def test_what_is_refused(llm: RagCacheLLM, make: Callable[[RagCacheLLM], object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make(llm)


class TestStates:
    """A node is answered from its states only where the model reads just what they were made from."""

    @pytest.fixture
    def nodes(self, cache: RagCache) -> list[TextNode]:
        """Nodes of a document, indexed."""
        texts = [f"The ferry number {number} left at {number} o'clock." for number in range(4)]
        source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id="ferries")}
        nodes = [
            TextNode(id_=f"n{number}", text=text, metadata={"page": number, "secret": 1}, relationships=source)
            for number, text in enumerate(texts)
        ]
        for node in nodes:
            node.excluded_llm_metadata_keys = ["secret"]
        cache.index_nodes(nodes)
        return nodes

    def misses(self, llm: RagCacheLLM, *nodes: TextNode) -> dict[str, str]:
        scored = [NodeWithScore(node=node, score=1.0 - 0.1 * place) for place, node in enumerate(nodes)]
        response = RagCacheSynthesizer(llm).synthesize(QUESTION, scored)
        found = report(response)
        assert [source["chunk_id"] for source in found["sources"]] == [node.node_id for node in nodes]
        # Whatever came from where, the prompt is one and the same.
        frame = llm.cache.template.frame(QUESTION)
        passages = [llm.cache.template.passage(node.get_content(MetadataMode.LLM).strip()) for node in nodes]
        ids = (*frame.prefix, *(it for passage in passages for it in passage), *frame.question)
        assert sum(found["tokens"][name] for name in ("prefix", "remembered", "restored", "prefilled")) == len(ids)
        if len(found["misses"]) == len(nodes) or len(nodes) == 1:
            # Nothing restored, or only what is exact.
            assert str(response) == llm.cache.generate(ids).answer.answer
        return {miss["chunk_id"]: miss["reason"] for miss in found["misses"]}

    def test_as_indexed(self, llm: RagCacheLLM, nodes: list[TextNode]) -> None:
        assert self.misses(llm, *nodes) == {}
        assert self.misses(llm, nodes[2]) == {}

    def test_edited_text_is_never_served_stale(self, llm: RagCacheLLM, nodes: list[TextNode]) -> None:
        edited = nodes[1].model_copy(update={"text": nodes[1].text.replace("1 o'clock", "9 o'clock")})
        assert self.misses(llm, nodes[0], edited) == {"n1": "not_stored"}
        assert self.misses(llm, edited) == {"n1": "not_stored"}

    def test_edited_metadata(self, llm: RagCacheLLM, nodes: list[TextNode]) -> None:
        shown = nodes[1].model_copy(update={"metadata": {"page": 7, "secret": 1}})
        hidden = nodes[1].model_copy(update={"metadata": {"page": 1, "secret": 2}})
        assert self.misses(llm, shown) == {"n1": "not_stored"}
        assert self.misses(llm, hidden) == {}

    def test_the_same_text_under_another_id(self, llm: RagCacheLLM, nodes: list[TextNode]) -> None:
        assert self.misses(llm, nodes[1].model_copy(update={"id_": "another"}), nodes[0]) == {}

    def test_nodes_of_two_stores(
        self, llm: RagCacheLLM, nodes: list[TextNode], open_tiny: Callable[..., RagCache], tmp_path: Path
    ) -> None:
        other = open_tiny(tmp_path / "other")
        other.index([make_document(9)])
        (foreign,) = RagCacheRetriever(other, similarity_top_k=1).retrieve(QUESTION)
        assert isinstance(foreign.node, TextNode)
        assert self.misses(llm, nodes[0], foreign.node, nodes[1]) == {foreign.node_id: "not_stored"}
        assert self.misses(RagCacheLLM(other), foreign.node, nodes[0]) == {"n0": "not_stored"}

    def test_a_reranker_that_reorders(self, cache: RagCache, llm: RagCacheLLM, nodes: list[TextNode]) -> None:
        class Backwards(BaseNodePostprocessor):
            def _postprocess_nodes(
                self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
            ) -> list[NodeWithScore]:
                return [NodeWithScore(node=it.node, score=float(place)) for place, it in enumerate(nodes)][::-1]

        retrieved = [it.node_id for it in RagCacheRetriever(cache, similarity_top_k=3).retrieve(QUESTION)]
        found = report(engine(cache, llm, node_postprocessors=[Backwards()]).query(QUESTION))
        assert [source["chunk_id"] for source in found["sources"]] == retrieved[::-1]
        assert found["misses"] == []

    def test_a_postprocessor_that_puts_other_text_in_place(
        self, cache: RagCache, llm: RagCacheLLM, nodes: list[TextNode]
    ) -> None:
        replace_text = MetadataReplacementPostProcessor(target_metadata_key="window")
        nodes[0].metadata["window"] = "The ferry left, came back, and left again."
        scored = [NodeWithScore(node=node, score=0.5) for node in nodes[:2]]
        query_engine = RetrieverQueryEngine(
            FixedRetriever(scored), RagCacheSynthesizer(llm), node_postprocessors=[replace_text]
        )
        assert [miss["chunk_id"] for miss in report(query_engine.query(QUESTION))["misses"]] == ["n0"]


class FixedRetriever(BaseRetriever):
    def __init__(self, nodes: list[NodeWithScore]) -> None:
        super().__init__()
        self._nodes = nodes

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return list(self._nodes)


class TestStoreMissing:
    def stranger(self, text: str = "The ferry Aurora passed at noon.") -> NodeWithScore:
        return NodeWithScore(node=TextNode(id_="elsewhere", text=text), score=0.3)

    @pytest.mark.parametrize("streaming", [False, True])
    def test_once(self, cache: RagCache, llm: RagCacheLLM, streaming: bool) -> None:
        synthesizer = RagCacheSynthesizer(llm, streaming=streaming, store_missing=True)
        first = synthesizer.synthesize(QUESTION, [self.stranger()])
        text = str(first)
        assert [miss["reason"] for miss in report(first)["misses"]] == ["not_stored"]
        synthesizer.wait_stored()
        again = synthesizer.synthesize(QUESTION, [self.stranger()])
        assert str(again) == text
        assert report(again)["misses"] == []
        assert cache.retrieve("the ferry Aurora", 1)[0].chunk.chunk_id == "elsewhere"

    def test_what_was_indexed_does_not_go_for_what_a_postprocessor_made_of_it(
        self, cache: RagCache, llm: RagCacheLLM, caplog: pytest.LogCaptureFixture
    ) -> None:
        (scored,) = RagCacheRetriever(cache, similarity_top_k=1).retrieve(QUESTION)
        before = cache.store.catalog.chunks_by_id([scored.node_id])
        edited = scored.node.model_copy(update={"text": "Nothing passed."})
        synthesizer = RagCacheSynthesizer(llm, store_missing=True)
        response = synthesizer.synthesize(QUESTION, [NodeWithScore(node=edited, score=1.0), self.stranger()])
        assert [miss["reason"] for miss in report(response)["misses"]] == ["not_stored", "not_stored"]
        synthesizer.wait_stored()
        assert cache.store.catalog.chunks_by_id([scored.node_id]) == before
        assert "index it again" in caplog.text
        assert cache.store.catalog.chunks_by_id(["elsewhere"])

    def test_nothing_is_stored_unasked(self, cache: RagCache, llm: RagCacheLLM) -> None:
        RagCacheSynthesizer(llm).synthesize(QUESTION, [self.stranger()])
        assert not cache.store.catalog.chunks_by_id(["elsewhere"])

    def test_what_cannot_be_stored_is_told(
        self, cache: RagCache, llm: RagCacheLLM, caplog: pytest.LogCaptureFixture
    ) -> None:
        synthesizer = RagCacheSynthesizer(llm, store_missing=True)
        unsayable = NodeWithScore(node=TextNode(text="A ship.", metadata={"crew": object()}), score=1.0)
        assert str(synthesizer.synthesize(QUESTION, [unsayable]))
        synthesizer.wait_stored()
        assert "were not stored" in caplog.text


def plainly_answered(llm: RagCacheLLM, template: BasePromptTemplate, nodes: list[NodeWithScore]) -> str:
    """The answer after a plain prefill of the prompt that a template words; its text is what LlamaIndex makes of it."""
    cache, frame = llm.cache, llm.frame(template, QUESTION)
    texts = [scored.node.get_content(MetadataMode.LLM) for scored in nodes]
    ids = (*frame.prefix, *(it for text in texts for it in cache.template.passage(text)), *frame.question)
    shown = "".join(f"{text}\n\n" for text in texts)
    messages = template.format_messages(llm=llm, context_str=shown, query_str=QUESTION)
    rendered = cache.template.render([{"role": it.role.value, "content": it.content or ""} for it in messages])
    assert cache.model.tokenizer.decode(list(ids)) == rendered
    return cache.generate(ids).answer.answer


class TestTemplates:
    BRIEF = ChatPromptTemplate(
        message_templates=[
            ChatMessage(role="system", content="Be brief."),
            ChatMessage(role="user", content="Read {context_str}and say: {query_str} Now."),
        ]
    )

    def test_the_store_s_own_is_the_default(self, cache: RagCache, llm: RagCacheLLM) -> None:
        query_engine = engine(cache, llm)
        (name,) = [it for it in query_engine.get_prompts() if it.endswith("text_qa_template")]
        own = query_engine.get_prompts()[name]
        before = query_engine.query(QUESTION)
        query_engine.update_prompts({name: own})
        after = query_engine.query(QUESTION)
        assert str(after) == str(before)
        assert report(after)["tokens"] == report(before)["tokens"]

    def test_what_is_behind_the_passages_is_free(self, cache: RagCache, llm: RagCacheLLM) -> None:
        own = default_template(cache.settings).message_templates
        own[-1].content = str(own[-1].content).replace("Question: {query_str}", "Answer in verse. {query_str} Verse:")
        nodes = RagCacheRetriever(cache, similarity_top_k=1).retrieve(QUESTION)
        response = RagCacheSynthesizer(llm, ChatPromptTemplate(message_templates=own)).synthesize(QUESTION, nodes)
        assert report(response)["misses"] == []
        assert report(response)["tokens"]["restored"] > 0
        assert str(response) == plainly_answered(llm, ChatPromptTemplate(message_templates=own), nodes)

    def test_another_beginning_is_told_and_prefilled(
        self, cache: RagCache, llm: RagCacheLLM, caplog: pytest.LogCaptureFixture
    ) -> None:
        nodes = RagCacheRetriever(cache, similarity_top_k=2).retrieve(QUESTION)
        response = RagCacheSynthesizer(llm, self.BRIEF).synthesize(QUESTION, nodes)
        assert "their states cannot serve it" in caplog.text
        found = report(response)
        assert [miss["reason"] for miss in found["misses"]] == ["prefix", "prefix"]
        assert (found["tokens"]["restored"], found["tokens"]["prefix"], found["reuse"]) == (0, 0, "none")
        assert str(response) == plainly_answered(llm, self.BRIEF, nodes)
        cache.close()
        assert cache.stats().misses == {"prefix": 2}

    @pytest.mark.parametrize(
        "template", [BRIEF, DEFAULT_TEXT_QA_PROMPT_SEL, PromptTemplate("{context_str}?{query_str}")]
    )
    def test_a_store_made_for_a_template(
        self,
        open_tiny: Callable[..., RagCache],
        tmp_path: Path,
        template: BasePromptTemplate,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        cache = open_tiny(tmp_path / "made", **prompt_settings(template))
        cache.index([make_document(1)])
        llm = RagCacheLLM(cache)
        nodes = RagCacheRetriever(cache, similarity_top_k=1).retrieve(QUESTION)
        response = RagCacheSynthesizer(llm, template).synthesize(QUESTION, nodes)
        assert not caplog.records
        assert report(response)["misses"] == []
        assert report(response)["tokens"]["restored"] > 0
        assert str(response) == plainly_answered(llm, template, nodes)

    def test_special_tokens_in_a_question_are_characters(self, cache: RagCache, llm: RagCacheLLM) -> None:
        question = "What is <|im_end|>?"
        end = cache.model.tokenizer.convert_tokens_to_ids("<|im_end|>")
        without, with_it = (llm.frame(self.BRIEF, it).question for it in ("What is?", question))
        assert with_it.count(end) == without.count(end)

    @pytest.mark.parametrize(
        ("template", "expected"),
        [
            (RichPromptTemplate("{{ context_str }}Q: {{ query_str | upper }}"), "Q: WHICH SHIPS PASSED?"),
            (RichPromptTemplate("{{ context_str }}Q: {{ query_str[:5] }}"), "Q: Which"),
            (
                RichPromptTemplate("{{ context_str }}{% if query_str|length > 21 %}Long: {% endif %}{{ query_str }}"),
                "Which ships passed?",
            ),
            (
                PromptTemplate(
                    "{context_str}{examples}Q: {query_str}",
                    function_mappings={"examples": lambda **given: f"({len(given['query_str'])} characters) "},
                ),
                "(19 characters) Q: Which ships passed?",
            ),
            (PromptTemplate("{context_str}@@ragcache:question@@ {query_str}"), "@@ragcache:question@@ " + QUESTION),
        ],
    )
    def test_a_template_may_look_at_the_question(
        self, llm: RagCacheLLM, template: BasePromptTemplate, expected: str
    ) -> None:
        behind = llm.cache.model.tokenizer.decode(list(llm.frame(template, QUESTION).question))
        assert behind == f"{expected}<|im_end|>\n<|im_start|>assistant\n"

    def test_special_tokens_in_a_question_that_a_template_changes(self, llm: RagCacheLLM) -> None:
        with pytest.raises(QuestionError, match=r"spells '<\|im_end\|>'"):
            llm.frame(RichPromptTemplate("{{ context_str }}{{ query_str | title }}"), "What is <|im_end|>?")

    @pytest.mark.parametrize(
        "template",
        [
            RichPromptTemplate("{{ context_str | upper }} {{ query_str }}"),
            RichPromptTemplate("{% for it in context_str.split('\n\n') %}* {{ it }}{% endfor %} {{ query_str }}"),
            PromptTemplate("@@ragcache:chunks@@ {context_str} {query_str}"),
        ],
    )
    def test_passages_are_taken_as_they_are(self, llm: RagCacheLLM, template: BasePromptTemplate) -> None:
        with pytest.raises(SettingsError, match="exactly once, as they are"):
            RagCacheSynthesizer(llm, template)

    def test_a_question_with_space_around_it(self, cache: RagCache, llm: RagCacheLLM) -> None:
        own = default_template(cache.settings)
        assert llm.frame(own, " Why? <|im_end|>\n") == cache.template.frame(" Why? <|im_end|>\n")

    @pytest.mark.parametrize(
        "template",
        [
            PromptTemplate("{query_str} {context_str}"),
            PromptTemplate("{context_str}"),
            ChatPromptTemplate(message_templates=[ChatMessage(role="assistant", content="{context_str} {query_str}")]),
        ],
    )
    def test_no_store_can_be_made_for(self, template: BasePromptTemplate) -> None:
        with pytest.raises(SettingsError):
            prompt_settings(template)
