"""An ordinary local LLM for LlamaIndex that can also answer from nodes whose states are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    CompletionResponse,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms.callbacks import llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.schema import MetadataMode, NodeWithScore

from ragcache.answer import Answer
from ragcache.indexer.nodes import prompt_text
from ragcache.pipeline import RagCache
from ragcache.stream import AnswerStream, ContextChunk

OPTIONS = ("max_tokens", "temperature", "top_p", "seed", "stop")


class RagCacheLLM(CustomLLM):
    """The language model of an opened store.

    `complete` and `chat` are plain calls of the model. `complete_with_nodes` answers from nodes and restores the KV of
    those that the store has states of.
    """

    context_window: int = Field(description="Most tokens of prompt and answer together")
    model_name: str = Field(description="What the model was loaded as")
    max_tokens: int = Field(description="Longest answer, in tokens")

    _cache: RagCache = PrivateAttr()

    def __init__(self, cache: RagCache, **kwargs: Any) -> None:
        """Wrap an opened store; `kwargs` go to LlamaIndex's `LLM`."""
        fields: dict[str, Any] = {
            "context_window": cache.model.context_window,
            "model_name": cache.model.name,
            "max_tokens": cache.settings.max_tokens,
            "messages_to_prompt": lambda messages: _render(cache, messages),
            "completion_to_prompt": lambda text: _render(cache, [ChatMessage(role="user", content=text)]),
        }
        super().__init__(**fields | kwargs)
        self._cache = cache

    @classmethod
    def class_name(cls) -> str:
        """Key of the class in serialised components."""
        return "RagCacheLLM"

    @property
    def cache(self) -> RagCache:
        """The store behind this LLM."""
        return self._cache

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex plans prompts by."""
        return LLMMetadata(
            context_window=self.context_window,
            num_output=self.max_tokens,
            is_chat_model=True,
            model_name=self.model_name,
        )

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a prompt by a plain prefill."""
        return _response(self._generate(prompt, formatted, kwargs).answer)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Complete a prompt by a plain prefill, piece by piece."""
        return _stream(self._generate(prompt, formatted, kwargs))

    @llm_completion_callback()
    def complete_with_nodes(self, prompt: str, nodes: Sequence[NodeWithScore], **kwargs: Any) -> CompletionResponse:
        """Answer a question from nodes, in their order; `raw` holds the whole `ragcache.answer.Answer`."""
        return _response(self.stream_with_nodes(prompt, nodes, **kwargs).answer)

    def stream_with_nodes(self, prompt: str, nodes: Sequence[NodeWithScore], **kwargs: Any) -> AnswerStream:
        """Answer a question from nodes, in their order, piece by piece."""
        chunks = [self._chunk(node) for node in nodes]
        return self._cache.stream_from(prompt, chunks, **self._options(kwargs))

    def _chunk(self, scored: NodeWithScore) -> ContextChunk:
        node = scored.node
        title = str(node.metadata.get("title") or node.metadata.get("file_name") or "")
        text = node.get_content(metadata_mode=MetadataMode.NONE)
        return self._cache.answering.find_chunk(node.node_id, title, text, scored.score or 0.0, prompt_text(node))

    def _generate(self, prompt: str, formatted: bool, kwargs: dict[str, Any]) -> AnswerStream:
        text = prompt if formatted or self.completion_to_prompt is None else self.completion_to_prompt(prompt)
        return self._cache.generate(self._cache.template.formatted(text), **self._options(kwargs))

    def _options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens} | {name: kwargs[name] for name in OPTIONS if name in kwargs}


def _render(cache: RagCache, messages: Sequence[ChatMessage]) -> str:
    return cache.template.render([{"role": m.role.value, "content": m.content or ""} for m in messages])


def _response(answer: Answer) -> CompletionResponse:
    prompt_tokens = answer.tokens.prompt
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer.tokens.generated,
        "total_tokens": prompt_tokens + answer.tokens.generated,
        "prompt_tokens_details": {"cached_tokens": prompt_tokens - answer.tokens.prefilled},
    }
    return CompletionResponse(text=answer.answer, raw={"usage": usage, "ragcache": answer.model_dump(mode="json")})


def _stream(pieces: AnswerStream) -> CompletionResponseGen:
    text = ""
    for piece in pieces:
        text += piece
        yield CompletionResponse(text=text, delta=piece)
    last = _response(pieces.answer)
    last.delta = ""
    yield last
