"""The response synthesizer: the one place in LlamaIndex that sees node ids and scores together with the question."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any

from llama_index.core.base.llms.types import CompletionResponseAsyncGen, CompletionResponseGen
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers.base import BaseSynthesizer, QueryTextType
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.types import RESPONSE_TEXT_TYPE

from ragcache.llama_index.llm import RagCacheLLM


class RagCacheSynthesizer(BaseSynthesizer):
    """Answers from nodes with KV restored from stored states.

    Nodes may have been reordered or dropped by postprocessors, or come from elsewhere: one without stored states is
    prefilled from its text. `response.metadata["ragcache"]` of a response that is not streamed says what was restored.
    """

    def __init__(self, llm: RagCacheLLM, streaming: bool = False, **kwargs: Any) -> None:
        """Answer with `llm`; `kwargs` go to LlamaIndex's `BaseSynthesizer`."""
        super().__init__(llm=llm, streaming=streaming, **kwargs)
        self._ragcache_llm = llm

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
        nodes = scored_nodes if scored_nodes is not None else _as_nodes(text_chunks)
        if self._streaming:
            return _pieces(self._ragcache_llm.stream_complete_with_nodes(query_str, nodes))
        response = self._ragcache_llm.complete_with_nodes(query_str, nodes)
        if report is not None:
            report.update(dict(response.raw or {})["ragcache"])
        return str(response.text)

    async def aget_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        scored_nodes: Sequence[NodeWithScore] | None = None,
        report: dict[str, Any] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """As `get_response`, in a worker thread."""
        nodes = scored_nodes if scored_nodes is not None else _as_nodes(text_chunks)
        if self._streaming:
            return _apieces(await self._ragcache_llm.astream_complete_with_nodes(query_str, nodes))
        response = await self._ragcache_llm.acomplete_with_nodes(query_str, nodes)
        if report is not None:
            report.update(dict(response.raw or {})["ragcache"])
        return str(response.text)

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        """The prompt's prefix is part of what states depend on: it is set when the store is made."""


def _as_nodes(texts: Sequence[str]) -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text=text), score=0.0) for text in texts]


def _pieces(responses: CompletionResponseGen) -> Generator[str, None, None]:
    for response in responses:
        yield response.delta or ""


async def _apieces(responses: CompletionResponseAsyncGen) -> AsyncGenerator[str, None]:
    async for response in responses:
        yield response.delta or ""


def _with_report(response: RESPONSE_TYPE, report: dict[str, Any]) -> RESPONSE_TYPE:
    if report and response.metadata is not None:
        response.metadata["ragcache"] = report
    return response
