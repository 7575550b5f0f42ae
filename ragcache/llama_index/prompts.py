"""LlamaIndex's question-answering templates, and what a store must be made with for its states to serve them.

Passages are encoded after what stands before them in a prompt. So a template's text before `{context_str}` is the
store's, and the text behind it is free.
"""

from __future__ import annotations

from typing import Any

from jinja2.exceptions import TemplateError
from llama_index.core.base.llms.types import ChatMessage, LLMMetadata, MessageRole
from llama_index.core.llms.llm import LLM
from llama_index.core.llms.mock import MockLLM
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate

from ragcache.errors import SettingsError
from ragcache.settings import Settings, load_settings


def prompt_settings(text_qa_template: BasePromptTemplate) -> dict[str, Any]:
    """The settings `system_prompt` and `user_prompt` of a store whose states serve a template.

    Args:
        text_qa_template: with `{context_str}` and `{query_str}` behind it in the user's message, and at most a message
            of the system before.

    Raises:
        SettingsError: it is of another kind.
    """
    messages = formatted(text_qa_template, "{passages}", "{question}", _ChatModel(max_tokens=None))
    *system, user = messages or [ChatMessage(role=MessageRole.USER, content="")]
    if [it.role for it in system] not in ([], [MessageRole.SYSTEM]) or user.role != MessageRole.USER:
        roles = ", ".join(message.role.value for message in messages)
        raise SettingsError(
            "a store can be made for a template of one message of the user, and one of the system before, not for "
            f"{roles}"
        )
    settings: dict[str, Any] = {
        "system_prompt": system[0].content or "" if system else "",
        "user_prompt": user.content or "",
    }
    load_settings(**settings)
    return settings


def default_template(settings: Settings) -> ChatPromptTemplate:
    """The template that a store was made for."""
    user = settings.user_prompt.replace("{passages}", "{context_str}").replace("{question}", "{query_str}")
    system = [ChatMessage(role=MessageRole.SYSTEM, content=settings.system_prompt)] if settings.system_prompt else []
    return ChatPromptTemplate(message_templates=[*system, ChatMessage(role=MessageRole.USER, content=user)])


def formatted(template: BasePromptTemplate, passages: str, question: str, llm: LLM) -> list[ChatMessage]:
    """The messages of a template for some passages and a question.

    Raises:
        SettingsError: it cannot be filled with these two.
    """
    try:
        return template.format_messages(llm=llm, context_str=passages, query_str=question)
    except (KeyError, ValueError, TemplateError) as error:
        raise SettingsError(
            f"the text_qa_template cannot be filled with context_str and query_str alone: {error}; give values for the "
            "rest with partial_format"
        ) from error


class _ChatModel(MockLLM):
    """What templates that differ by model look at."""

    @property
    def metadata(self) -> LLMMetadata:
        """As of a RagCacheLLM."""
        return LLMMetadata(is_chat_model=True)
