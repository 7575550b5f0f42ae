"""Every knob, typed, in one place.

Precedence: argument > `RAGCACHE_*` environment variable > `store.toml` of the opened store > default.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from platformdirs import user_cache_path
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from ragcache.errors import SettingsError

STORE_TOML = "store.toml"
ENVIRONMENT_PREFIX = "RAGCACHE_"

DEFAULT_SYSTEM_PROMPT = (
    "You answer questions with the help of the passages given, and say so when they do not hold the answer."
)

DEFAULT_USER_PROMPT = "Passages:\n\n{passages}Question: {question}"

Reuse = Literal["composed", "exact", "none"]
"""How stored states serve a query.

`composed`: every retrieved chunk is restored; chunks were encoded apart from each other. `exact`: stored states
only where they equal a full prefill's. `none`: a plain prefill, stored states are not touched.
"""

EncodingName = Literal["alone", "context"]
"""What a chunk was encoded after.

`alone`: the prompt's prefix only, so it is exact where the chunk stands first. `context`: the prefix and real text, as
much as stands before it in a prompt; only the chunk's own states are kept.
"""

ContextName = Literal["document", "neighbours"]
"""What text a `context` encoding comes after.

`document`: the document's own preceding text, filled up with the most similar chunks of the corpus. `neighbours`: those
alone.
"""

Order = Literal["conditioned", "score", "score-last", "document", "given"]
"""How chunks stand in the prompt.

`conditioned`: first one that is exact there, then each after what it was encoded with, as far as scores allow. `score`:
the best first. `score-last`: the best next to the question. `document`: as in their documents. `given`: as they come.
"""

Repair = Literal["off", "query", "boundary", "deviation"]
"""Which of the chunks' tokens are computed again with everything before them in view.

`query`: those that the question attends to most (FusionRAG, arXiv 2601.12904, section 3.2). `boundary`: the first ones
of each chunk (EPIC, arXiv 2410.15332). `deviation`: those whose values at the second layer change most (CacheBlend,
arXiv 2405.16444, section 4.3).
"""

StatesName = Literal["auto", "hidden", "pre-rope-kv"]
"""What is stored of a chunk; `auto` plans for each layer what is restored fastest on this machine."""

CodecName = Literal["int8", "int4", "raw", "bf16", "fp16"]
ContainerName = Literal["arrow", "parquet"]
DtypeName = Literal["bfloat16", "float32", "float16"]


class QueryOptions(BaseModel):
    """How one query runs."""

    model_config = ConfigDict(frozen=True)

    top_k: int = Field(4, ge=1, description="Chunks retrieved for a question")
    reuse: Reuse = Field("composed", description="How stored states serve a query")
    encodings: Annotated[tuple[EncodingName, ...], NoDecode] = Field(
        ("alone", "context"), min_length=1, description="What chunks are encoded after: alone, context"
    )
    order: Order = Field("conditioned", description="How chunks stand in the prompt")
    repair: Repair = Field("off", description="Which tokens of chunks are computed again with all before them in view")
    repair_ratio: float = Field(0.15, ge=0.0, le=1.0, description="Share of the chunks' tokens that is repaired")
    repair_ms: float | None = Field(None, gt=0, description="Time for repair; takes the place of the ratio")
    max_tokens: int = Field(256, ge=1, description="Longest answer, in tokens")
    temperature: float = Field(0.0, ge=0.0, description="0 takes the most probable token each time")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Draw from the smallest set of tokens of this probability")
    seed: int | None = Field(None, ge=0, lt=2**63, description="Makes drawing repeatable")
    stop: tuple[str, ...] = Field((), description="Texts that end the answer; they are not part of it")

    @field_validator("encodings", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        """Names may also come in one text, with commas between them."""
        names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
        if not isinstance(names, list | tuple):
            return names
        # Each once; not by hash, which not everything has that may be given here.
        return tuple(name for at, name in enumerate(names) if name not in names[:at])

    @field_validator("*")
    @classmethod
    def _is_unicode(cls, value: Any) -> Any:
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and any("\ud800" <= character <= "\udfff" for character in text):
                raise ValueError("it holds half a surrogate pair")
        return value


class Settings(BaseSettings, QueryOptions):
    """Settings of one opened store and of the queries against it."""

    model_config = SettingsConfigDict(env_prefix=ENVIRONMENT_PREFIX, extra="ignore", frozen=True)

    # What the store's content depends on (STORED_SETTINGS).
    model: str = Field("smollm2-135m", description="Hub id, local folder, .gguf file or alias of the language model")
    adapter: str = Field("", description="Hub id or local folder of a LoRA adapter for the language model")
    embedding_model: str = Field("all-minilm-l6-v2", description="Hub id, local folder or alias of the embedding model")
    dtype: DtypeName = Field("bfloat16", description="Precision the language model computes in")
    states: StatesName = Field("auto", description="What is stored: hidden states, or keys and values before RoPE")
    codec: CodecName = Field(
        "int8", description="Precision of stored states: int8, int4, raw (as computed), bf16, fp16"
    )
    chunk_tokens: int = Field(512, ge=32, description="Largest chunk in the language model's tokens, header included")
    chunk_overlap: int = Field(0, ge=0, description="Tokens that neighbouring chunks share")
    context: ContextName = Field("document", description="Text that a context encoding comes after")
    context_tokens: int = Field(512, ge=1, description="Length of that text, in tokens")
    contexts: int = Field(3, ge=1, le=16, description="Contexts of a chunk; its states are the mean of those in each")
    system_prompt: str = Field(
        DEFAULT_SYSTEM_PROMPT, description="Start of every prompt, may be empty; states depend on it"
    )
    user_prompt: str = Field(
        DEFAULT_USER_PROMPT,
        description="The message with {passages} and {question}; states depend on what is before the passages",
    )

    # How the machine is used.
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    trust_remote_code: bool = Field(False, description="Let a model folder run its own Python code")
    batch_tokens: int = Field(2048, ge=1, description="Tokens encoded in one forward pass while indexing")
    shard_megabytes: int = Field(256, ge=1, description="Size at which a shard file is closed")
    shard_format: ContainerName = Field("arrow", description="File format of new shards: arrow (IPC) or parquet")
    state_folders: tuple[Path, ...] = Field((), description="Where shards go, in turn; one folder on each disk")
    budget_megabytes: int = Field(0, ge=0, description="Most that all shards together may take; 0 is without limit")
    free_megabytes: int = Field(1024, ge=0, description="What stays free on the disks of the shards")
    sequence_megabytes: int = Field(0, ge=0, description="Memory for prompts whose exact KV are remembered")
    canary_rate: float = Field(0.0, ge=0.0, le=1.0, description="Share of answers compared with a full prefill's")
    verify_checksums: bool = Field(True, description="Compare the checksum of all states that are read")
    reader_threads: int = Field(2, ge=1, description="Threads that read states from disk")
    cache_folder: Path = Field(
        default_factory=lambda: user_cache_path("ragcache"),
        description="Converted models, file digests and measured rates",
    )

    @field_validator("user_prompt")
    @classmethod
    def _frames(cls, text: str) -> str:
        before, _, _ = text.partition("{passages}")
        if text.count("{passages}") != 1 or text.count("{question}") != 1 or "{question}" in before:
            raise ValueError("it must hold {passages} once, and {question} once behind it")
        return text

    @field_validator("state_folders")
    @classmethod
    def _absolute(cls, folders: tuple[Path, ...]) -> tuple[Path, ...]:
        # They are remembered, and the next process may run in another folder.
        return tuple(folder.resolve() for folder in folders)


STORED_SETTINGS = (
    "model",
    "adapter",
    "embedding_model",
    "dtype",
    "states",
    "codec",
    "chunk_tokens",
    "chunk_overlap",
    "encodings",
    "order",
    "repair",
    "repair_ratio",
    "context",
    "context_tokens",
    "contexts",
    "system_prompt",
    "user_prompt",
    "shard_format",
    "state_folders",
    "budget_megabytes",
    "free_megabytes",
)
"""The settings that belong to a store rather than to one run; they are kept in its `store.toml`."""


def stored_settings(settings: Settings) -> dict[str, Any]:
    """What `store.toml` must hold: the settings that belong to a store."""
    values = settings.model_dump(mode="json", include=set(STORED_SETTINGS))
    return {name: values[name] for name in STORED_SETTINGS}


NOT_FROM_STORES = ("trust_remote_code", "cache_folder")
"""Settings that `store.toml` cannot make: a store from somewhere else must not decide what code runs here, nor where
files are written. `device` chooses only among what this machine has."""


class StoreTomlSource(TomlConfigSettingsSource):
    """Settings from a store's `store.toml`."""

    def __call__(self) -> dict[str, Any]:
        """What the file says, less what it may not decide, which is warned of."""
        values = super().__call__()
        for name in NOT_FROM_STORES:
            if name in values:
                _warn(
                    f"{name} in {self.toml_file_path} is ignored, for safety; give it as an argument or as "
                    f"{ENVIRONMENT_PREFIX}{name.upper()}"
                )
        return {name: value for name, value in values.items() if name not in NOT_FROM_STORES}


def load_settings(store: Path | None = None, **arguments: Any) -> Settings:
    """Gather settings for a store.

    Args:
        store: folder of a state store; its `store.toml` is read when it exists.
        arguments: explicit values; `None` means not given.

    Raises:
        SettingsError: a value is out of range or of the wrong type, or there is no such setting.
    """
    toml_file = store / STORE_TOML if store else None

    class BoundSettings(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return (init_settings, env_settings, StoreTomlSource(settings_cls, toml_file=toml_file))

    if unknown := sorted(set(arguments) - set(Settings.model_fields)):
        raise SettingsError(f"unknown setting {unknown[0]!r}; known: {', '.join(Settings.model_fields)}")
    for variable in sorted(os.environ):
        name = variable.upper().removeprefix(ENVIRONMENT_PREFIX)
        if variable.upper().startswith(ENVIRONMENT_PREFIX) and name.lower() not in Settings.model_fields:
            _warn(f"the environment variable {variable} is not a setting of ragcache")
    try:
        settings = BoundSettings(**{name: value for name, value in arguments.items() if value is not None})
    except ValidationError as error:
        raise _first_fault(error) from error
    except (ValueError, OSError) as error:
        raise SettingsError(f"settings cannot be read: {error}; check {toml_file} and RAGCACHE_* variables") from error
    if settings.chunk_overlap >= settings.chunk_tokens:
        raise SettingsError(
            f"chunk_overlap ({settings.chunk_overlap}) must be smaller than chunk_tokens ({settings.chunk_tokens})"
        )
    return settings


@cache
def _warn(message: str) -> None:
    """Warn once in a process, however often settings are gathered."""
    logging.getLogger(__name__).warning(message)


def query_options(settings: Settings, **arguments: Any) -> QueryOptions:
    """Options of one query: the settings', except where an argument is given.

    Args:
        settings: of the opened store.
        arguments: explicit values; `None` means not given.

    Raises:
        SettingsError: a value is out of range or of the wrong type, or there is no such option.
    """
    if unknown := sorted(set(arguments) - set(QueryOptions.model_fields)):
        raise SettingsError(f"unknown query option {unknown[0]!r}; known: {', '.join(QueryOptions.model_fields)}")
    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        return QueryOptions(**{name: getattr(settings, name) for name in QueryOptions.model_fields} | given)
    except ValidationError as error:
        raise _first_fault(error) from error


def _first_fault(error: ValidationError) -> SettingsError:
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    reason = first["msg"][:1].lower() + first["msg"][1:]
    return SettingsError(f"setting {name!r} cannot be {first['input']!r}: {reason.removeprefix('value error, ')}")
