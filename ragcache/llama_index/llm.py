"""An ordinary local LLM for LlamaIndex that can also answer from nodes whose states are stored."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any, NoReturn

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms.llm import LLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.schema import MetadataMode, NodeWithScore
from llama_index_instrumentation import get_dispatcher

from ragcache.errors import QuestionError, SettingsError
from ragcache.indexer.nodes import prompt_text
from ragcache.llama_index.events import Call
from ragcache.llama_index.messages import ChatPrompts
from ragcache.llama_index.prompts import formatted
from ragcache.llama_index.responses import Start, aopened, as_chat, as_completion, awhole, opened, whole
from ragcache.pipeline import RagCache
from ragcache.prompt.template import Frame
from ragcache.prompt.validity import check_question, is_unicode
from ragcache.settings import QueryOptions, query_options
from ragcache.stream import AnswerStream, ContextChunk

PLAIN_OPTIONS = ("max_tokens", "temperature", "top_p", "seed", "stop")
"""Query options that a call without nodes takes."""

NODE_OPTIONS = tuple(name for name in QueryOptions.model_fields if name != "top_k")
"""Query options that a call with nodes takes: all but how many are retrieved, which the retriever is told."""

_dispatcher = get_dispatcher(__name__)


class RagCacheLLM(LLM):
    """The language model of an opened store.

    `complete` and `chat` are plain calls of the model. `complete_with_nodes` answers from nodes and restores the KV of
    those that the store has states of. `raw` of a response, and of a stream's last item, holds the `usage` that
    LlamaIndex counts tokens by, and under `ragcache` the whole `ragcache.answer.Answer` as JSON.

    Async methods run the model on worker threads. Closing or dropping a stream, or cancelling a task that waits, ends
    the generation.

    Copies, deep ones too, share the opened store.
    """

    context_window: int = Field(description="Most tokens of prompt and answer together")
    model_name: str = Field(description="What the model was loaded as")
    max_tokens: int = Field(description="Longest answer, in tokens")
    defaults: dict[str, Any] = Field(description="Other query options, where a call does not say otherwise")

    _cache: RagCache = PrivateAttr()
    _prompts: ChatPrompts = PrivateAttr()

    def __init__(self, cache: RagCache, **kwargs: Any) -> None:
        """Wrap an opened store.

        Args:
            cache: the store.
            kwargs: fields of LlamaIndex's `LLM`, such as `callback_manager` and `system_prompt`, or query options but
                `top_k`, which become this LLM's defaults. Nodes are answered from in the order given, unless `order`
                is among them.

        Raises:
            SettingsError: there is no such field or option, or an option cannot be used.
        """
        known = (*NODE_OPTIONS, *(name for name in type(self).model_fields if name not in NODE_OPTIONS))
        _check_names(kwargs, known)
        given = kwargs.pop("defaults", {}) | {name: kwargs.pop(name) for name in NODE_OPTIONS if name in kwargs}
        given = _normalised(given)
        options = query_options(cache.settings, **given)
        prompts = ChatPrompts(cache.template, cache.model.tokenizer)
        fields: dict[str, Any] = {
            "context_window": cache.model.context_window,
            "model_name": cache.model.name,
            "max_tokens": options.max_tokens,
            "defaults": options.model_dump(mode="json", include=set(given) - {"max_tokens"}),
            "messages_to_prompt": prompts.messages_to_prompt,
            "completion_to_prompt": prompts.completion_to_prompt,
        }
        super().__init__(**fields | {name: value for name, value in kwargs.items() if value is not None})
        self._cache = cache
        self._prompts = prompts

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
            is_function_calling_model=False,
            model_name=self.model_name,
        )

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a prompt by a plain prefill.

        Args:
            prompt: what the user says.
            formatted: the prompt is a whole one already, with its special tokens as text.
            kwargs: query options of a plain call: `max_tokens`, `temperature`, `top_p`, `seed`, `stop`.

        Raises:
            SettingsError: there is no such option, or its value cannot be used.
            QuestionError: the prompt is empty, no Unicode, or too long for the context window.
        """
        call = Call.completion(self, prompt, kwargs)
        return call.run(lambda: whole(self._completion(prompt, formatted, kwargs), as_completion))

    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> Generator[CompletionResponse, None, None]:
        """Complete a prompt piece by piece; it is prefilled when this returns. See `complete`."""
        call = Call.completion(self, prompt, kwargs)
        return call.stream(lambda: opened(self._completion(prompt, formatted, kwargs), as_completion))

    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a prompt on a worker thread. See `complete`."""
        call = Call.completion(self, prompt, kwargs)
        return await call.arun(lambda: awhole(self._completion(prompt, formatted, kwargs), as_completion))

    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> AsyncGenerator[CompletionResponse, None]:
        """Complete a prompt piece by piece on a worker thread; the first is there when this returns. See `complete`."""
        call = Call.completion(self, prompt, kwargs)
        return await call.astream(lambda: aopened(self._completion(prompt, formatted, kwargs), as_completion))

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer the last of some messages by a plain prefill.

        Args:
            messages: text only.
            kwargs: query options of a plain call, as in `complete`.

        Raises:
            SettingsError: there is no such option, or its value cannot be used.
            QuestionError: messages hold something else than text or have roles that the model's chat template does not
                take, or they are too long for the context window.
        """
        call = Call.chat(self, messages, kwargs)
        return call.run(lambda: whole(self._chat(messages, kwargs), as_chat))

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Generator[ChatResponse, None, None]:
        """Answer messages piece by piece; they are prefilled when this returns. See `chat`."""
        call = Call.chat(self, messages, kwargs)
        return call.stream(lambda: opened(self._chat(messages, kwargs), as_chat))

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer messages on a worker thread. See `chat`."""
        call = Call.chat(self, messages, kwargs)
        return await call.arun(lambda: awhole(self._chat(messages, kwargs), as_chat))

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> AsyncGenerator[ChatResponse, None]:
        """Answer messages piece by piece on a worker thread; the first is there when this returns. See `chat`."""
        call = Call.chat(self, messages, kwargs)
        return await call.astream(lambda: aopened(self._chat(messages, kwargs), as_chat))

    @_dispatcher.span
    def complete_with_nodes(
        self,
        prompt: str,
        nodes: Sequence[NodeWithScore],
        text_qa_template: BasePromptTemplate | None = None,
        **kwargs: Any,
    ) -> CompletionResponse:
        """Answer a question from nodes, with KV restored from stored states.

        Args:
            prompt: the question.
            nodes: passages, in the order in which they stand in the prompt; one without stored states is prefilled.
            text_qa_template: words the prompt, with `{context_str}` and `{query_str}`; by default the store's own. With
                another text before `{context_str}` than the store's the whole prompt is prefilled.
            kwargs: any query options but `top_k`. With `order` the nodes are arranged otherwise.

        Raises:
            SettingsError: there is no such option, or its value cannot be used.
            QuestionError: the question is empty, no Unicode, or too long for the context window.
            PassageError: the text of a node is no Unicode, or its templates cannot be filled in.
        """
        call = Call.completion(self, prompt, kwargs)
        return call.run(lambda: whole(self._from_nodes(prompt, nodes, text_qa_template, kwargs), as_completion))

    @_dispatcher.span
    def stream_complete_with_nodes(
        self,
        prompt: str,
        nodes: Sequence[NodeWithScore],
        text_qa_template: BasePromptTemplate | None = None,
        **kwargs: Any,
    ) -> Generator[CompletionResponse, None, None]:
        """Answer from nodes piece by piece; all is restored when this returns. See `complete_with_nodes`."""
        call = Call.completion(self, prompt, kwargs)
        return call.stream(lambda: opened(self._from_nodes(prompt, nodes, text_qa_template, kwargs), as_completion))

    @_dispatcher.span
    async def acomplete_with_nodes(
        self,
        prompt: str,
        nodes: Sequence[NodeWithScore],
        text_qa_template: BasePromptTemplate | None = None,
        **kwargs: Any,
    ) -> CompletionResponse:
        """Answer from nodes on a worker thread. See `complete_with_nodes`."""
        call = Call.completion(self, prompt, kwargs)
        return await call.arun(lambda: awhole(self._from_nodes(prompt, nodes, text_qa_template, kwargs), as_completion))

    @_dispatcher.span
    async def astream_complete_with_nodes(
        self,
        prompt: str,
        nodes: Sequence[NodeWithScore],
        text_qa_template: BasePromptTemplate | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[CompletionResponse, None]:
        """Answer from nodes piece by piece on a worker thread. See `complete_with_nodes`."""
        call = Call.completion(self, prompt, kwargs)
        return await call.astream(
            lambda: aopened(self._from_nodes(prompt, nodes, text_qa_template, kwargs), as_completion)
        )

    def frame(self, text_qa_template: BasePromptTemplate, question: str) -> Frame:
        """What stands around passages in a prompt that a template words.

        Raises:
            SettingsError: it cannot be filled with passages and a question alone.
        """

        def rendered(passages: str, asked: str) -> str:
            return self._prompts.messages_to_prompt(formatted(text_qa_template, passages, asked, self))

        return self._cache.template.frame_of(rendered, question)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> RagCacheLLM:
        # A model is not to be in memory twice because somebody copies what refers to it.
        return self.model_copy()

    def __getstate__(self) -> NoReturn:
        # What LlamaIndex does instead leaves out the store, and says so when a question comes.
        raise TypeError("a RagCacheLLM holds an opened store and is not pickled; open the store where it is needed")

    def _completion(self, prompt: str, formatted: bool, kwargs: dict[str, Any]) -> Start:
        options = self._options(kwargs, PLAIN_OPTIONS)

        def start() -> AnswerStream:
            return self._cache.generate(self._completion_ids(prompt, formatted), **options)

        return start

    def _chat(self, messages: Sequence[ChatMessage], kwargs: dict[str, Any]) -> Start:
        options = self._options(kwargs, PLAIN_OPTIONS)

        def start() -> AnswerStream:
            return self._cache.generate(self._chat_ids(messages), **options)

        return start

    def _from_nodes(
        self,
        question: str,
        nodes: Sequence[NodeWithScore],
        template: BasePromptTemplate | None,
        kwargs: dict[str, Any],
    ) -> Start:
        options = self._options(kwargs, NODE_OPTIONS)

        def start() -> AnswerStream:
            check_question(question)
            frame = None if template is None else self.frame(template, question)
            return self._cache.stream_from(question, [self._chunk(node) for node in nodes], frame, **options)

        return start

    def _chunk(self, scored: NodeWithScore) -> ContextChunk:
        node = scored.node
        title = str(node.metadata.get("title") or node.metadata.get("file_name") or "")
        text = node.get_content(metadata_mode=MetadataMode.NONE)
        return self._cache.answering.find_chunk(node.node_id, title, text, scored.score or 0.0, prompt_text(node))

    def _completion_ids(self, prompt: str, formatted: bool) -> tuple[int, ...]:
        if not is_unicode(prompt):
            raise QuestionError("the prompt holds half a surrogate pair; send valid Unicode")
        if not formatted and self.completion_to_prompt == self._prompts.completion_to_prompt:
            return self._prompts.token_ids([ChatMessage(role=MessageRole.USER, content=prompt)])
        if not formatted and self.completion_to_prompt is not None:
            prompt = self.completion_to_prompt(prompt)
        return self._text_ids(prompt)

    def _chat_ids(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        if self.messages_to_prompt is None or self.messages_to_prompt == self._prompts.messages_to_prompt:
            return self._prompts.token_ids(messages)
        return self._text_ids(self.messages_to_prompt(messages))

    def _text_ids(self, prompt: str) -> tuple[int, ...]:
        ids = self._cache.template.formatted(prompt)
        if not ids:
            raise QuestionError("the prompt is empty; give some text")
        return ids

    def _options(self, kwargs: dict[str, Any], known: Sequence[str]) -> dict[str, Any]:
        """Options of one call: its own, else this LLM's."""
        _check_names(kwargs, known)
        options = {"max_tokens": self.max_tokens} | self.defaults | _normalised(kwargs)
        return {name: value for name, value in options.items() if name in known}


def _check_names(given: dict[str, Any], known: Sequence[str]) -> None:
    if unknown := sorted(set(given) - set(known)):
        raise SettingsError(f"unknown option {unknown[0]!r}; known: {', '.join(known)}")


def _normalised(options: dict[str, Any]) -> dict[str, Any]:
    """Options that are given, as `ragcache.settings` has them: LlamaIndex's users write one stop string as it is."""
    given = {name: value for name, value in options.items() if value is not None}
    stop = given.get("stop")
    return given | {"stop": (stop,)} if isinstance(stop, str) else given
