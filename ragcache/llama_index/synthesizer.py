"""The response synthesizer: the one place in LlamaIndex that sees node ids and scores together with the question."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from llama_index.core import Settings
from llama_index.core.base.llms.types import CompletionResponse, CompletionResponseAsyncGen, CompletionResponseGen
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers.base import BaseSynthesizer, QueryTextType
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.types import RESPONSE_TEXT_TYPE

from ragcache.errors import RagCacheError, SettingsError
from ragcache.llama_index.llm import RagCacheLLM
from ragcache.llama_index.prompts import default_template
from ragcache.states.miss import MissReason

TEMPLATE = "text_qa_template"
UNSUPPORTED = ("output_cls", "multimodal")

_logger = logging.getLogger(__name__)


class RagCacheSynthesizer(BaseSynthesizer):
    """Answers from nodes with KV restored from stored states, all of them in one prompt.

    Nodes may have been reordered, edited or dropped by postprocessors, or come from elsewhere: one without stored
    states is prefilled from its text. `response.metadata["ragcache"]` says what was restored, of a streamed response
    once it is read.
    """

    def __init__(
        self,
        llm: RagCacheLLM,
        text_qa_template: BasePromptTemplate | None = None,
        streaming: bool = False,
        store_missing: bool = False,
        **kwargs: Any,
    ) -> None:
        """Answer with an LLM.

        Args:
            llm: with the store. Its query options say how nodes are arranged and repaired, and how long answers are.
            text_qa_template: words the prompt, with `{context_str}` and `{query_str}`; by default the store's own.
                Stored states serve it only where its text before `{context_str}` is the store's; see
                `ragcache.llama_index.prompt_settings`.
            streaming: answers come piece by piece.
            store_missing: nodes that are not in the store are stored, after the answer and beside what follows.
            kwargs: go to LlamaIndex's `BaseSynthesizer`: `empty_response`, `callback_manager`.

        Raises:
            SettingsError: the LLM is another one, the template cannot be filled, or an argument is not supported.
        """
        if not isinstance(llm, RagCacheLLM):
            raise SettingsError(f"a RagCacheSynthesizer answers with a RagCacheLLM, not with {type(llm).__name__}")
        if refused := [name for name in UNSUPPORTED if kwargs.get(name)]:
            raise SettingsError(f"{refused[0]} is not supported: the model answers in text, from text")
        if kwargs.get("callback_manager") is None and not llm.callback_manager.handlers:
            # Where LlamaIndex makes a synthesizer, it does so itself.
            kwargs["callback_manager"] = Settings.callback_manager
        super().__init__(llm=llm, streaming=streaming, **kwargs)
        self._ragcache_llm = llm
        self._store_missing = store_missing
        self._keeper = ThreadPoolExecutor(1, thread_name_prefix="ragcache-store")
        self._stored: list[Future[None]] = []
        self._template: BasePromptTemplate | None = None
        if text_qa_template is not None:
            self._use(text_qa_template)

    def synthesize(
        self,
        query: QueryTextType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer a question from nodes."""
        # The base class hands on text only, but passes keyword arguments through to get_response.
        report: dict[str, Any] = {}
        response = super().synthesize(
            query, nodes, additional_source_nodes, scored_nodes=nodes, report=report, **response_kwargs
        )
        return _with_report(response, report)

    async def asynthesize(
        self,
        query: QueryTextType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer a question from nodes without blocking the event loop."""
        report: dict[str, Any] = {}
        response = await super().asynthesize(
            query, nodes, additional_source_nodes, scored_nodes=nodes, report=report, **response_kwargs
        )
        return _with_report(response, report)

    def get_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        scored_nodes: Sequence[NodeWithScore] | None = None,
        report: dict[str, Any] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """Answer from nodes; from bare texts when called without them."""
        nodes, report = _nodes(scored_nodes, text_chunks), {} if report is None else report
        if self._streaming:
            responses = self._ragcache_llm.stream_complete_with_nodes(query_str, nodes, self._template)
            return self._pieces(responses, nodes, report)
        return self._finished(self._ragcache_llm.complete_with_nodes(query_str, nodes, self._template), nodes, report)

    async def aget_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        scored_nodes: Sequence[NodeWithScore] | None = None,
        report: dict[str, Any] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """As `get_response`, on a worker thread."""
        nodes, report = _nodes(scored_nodes, text_chunks), {} if report is None else report
        if self._streaming:
            responses = await self._ragcache_llm.astream_complete_with_nodes(query_str, nodes, self._template)
            return self._apieces(responses, nodes, report)
        response = await self._ragcache_llm.acomplete_with_nodes(query_str, nodes, self._template)
        return self._finished(response, nodes, report)

    def wait_stored(self) -> None:
        """Wait until nodes that were missing so far are stored (`store_missing`)."""
        wait(self._stored)
        self._stored = []

    def _pieces(
        self, responses: CompletionResponseGen, nodes: Sequence[NodeWithScore], report: dict[str, Any]
    ) -> Generator[str, None, None]:
        response = None
        try:
            for response in responses:
                yield response.delta or ""
        finally:
            responses.close()
        if response is not None:
            self._finished(response, nodes, report)

    async def _apieces(
        self, responses: CompletionResponseAsyncGen, nodes: Sequence[NodeWithScore], report: dict[str, Any]
    ) -> AsyncGenerator[str, None]:
        response = None
        try:
            async for response in responses:
                yield response.delta or ""
        finally:
            await responses.aclose()
        if response is not None:
            self._finished(response, nodes, report)

    def _finished(self, response: CompletionResponse, nodes: Sequence[NodeWithScore], report: dict[str, Any]) -> str:
        """The text of a whole response; what it says of itself goes into the report."""
        report.update(dict(response.raw or {})["ragcache"])
        if self._store_missing:
            missing = {it["chunk_id"] for it in report["misses"] if it["reason"] == MissReason.NOT_STORED}
            if chosen := [scored for scored in nodes if scored.node.node_id in missing]:
                self._stored = [it for it in self._stored if not it.done()]
                self._stored.append(self._keeper.submit(self._keep, chosen))
        return response.text

    def _keep(self, nodes: Sequence[NodeWithScore]) -> None:
        cache = self._ragcache_llm.cache
        try:
            # A postprocessor may have put other text into a node, and what was indexed must not go for that.
            known = cache.node_documents([scored.node.node_id for scored in nodes])
            if new := [scored.node for scored in nodes if scored.node.node_id not in known]:
                cache.index_nodes(new, amend=True, wait=True)
            if known:
                _logger.warning(
                    "node %s reads otherwise than it does in the store, so it is prefilled, and not stored; if it has "
                    "changed for good, index it again",
                    min(known),
                )
        except RagCacheError as error:
            _logger.warning("nodes without states were not stored, and will be prefilled again: %s", error)

    def _get_prompts(self) -> PromptDictType:
        return {TEMPLATE: self._template or default_template(self._ragcache_llm.cache.settings)}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        if TEMPLATE in prompts:
            self._use(prompts[TEMPLATE])

    def _use(self, template: BasePromptTemplate) -> None:
        """Word prompts by a template, and say so if stored states cannot serve it."""
        own = self._ragcache_llm.cache.template.prefix
        prefix = self._ragcache_llm.frame(template, "?").prefix
        self._template = template
        if prefix != own:
            _logger.warning(
                "the text_qa_template begins otherwise than the prompts that this store's chunks were encoded for (%d "
                "tokens before the passages, not these %d), so their states cannot serve it: answers are right, but "
                "every prompt is prefilled as a whole. To restore, make a store for the template: "
                "RagCache.open(path, **prompt_settings(template)), and index into it",
                len(prefix),
                len(own),
            )


def _nodes(scored: Sequence[NodeWithScore] | None, texts: Sequence[str]) -> Sequence[NodeWithScore]:
    return scored if scored is not None else [NodeWithScore(node=TextNode(text=text), score=0.0) for text in texts]


def _with_report(response: RESPONSE_TYPE, report: dict[str, Any]) -> RESPONSE_TYPE:
    """A response that says what was restored; of a stream once it is read."""
    if response.metadata is not None:
        response.metadata["ragcache"] = report
    return response
