"""Every error ragcache raises on purpose. Each message is one line and says what to do.

The command line prints `error: <message>` and exits with 2 for any of them; the server maps them to status
codes. A fault in stored states is not an error: it is a miss (`ragcache.states.miss`), and the chunk is
recomputed within the same request.
"""


class RagCacheError(Exception):
    """Base class: catch this one to catch them all."""


class SettingsError(RagCacheError):
    """A setting has a value that cannot be used."""


class ModelError(RagCacheError):
    """A model cannot be used."""


class ModelNotFoundError(ModelError):
    """No model of that name here, in an installed package or on the hub."""


class UnsupportedModelError(ModelError):
    """The model's architecture, position encoding or file format is not supported."""


class CertificationError(UnsupportedModelError):
    """KV rebuilt from hidden states differ from the KV of a prefill, so the model is refused."""


class EncodingError(ModelError):
    """A prefill gave states that cannot be stored, such as NaN or infinity."""


class NotEnoughMemoryError(ModelError):
    """Memory ran out while a request was prepared; other requests are not concerned."""


class ProfileError(RagCacheError):
    """The rates of this machine cannot be measured, or a profile of them cannot be read."""


class SourceError(RagCacheError):
    """Documents cannot be read: nothing there, unreadable, binary, or not what the format says."""


class StoreError(RagCacheError):
    """A state store cannot be opened or changed."""


class StoreNotFoundError(StoreError):
    """There is no state store at the given path."""


class StoreMismatchError(StoreError):
    """The store was made with another model, embedding model or prompt prefix."""


class StoreLockedError(StoreError):
    """Another process is writing to the store."""


class VectorsError(StoreError):
    """The vector index of a store is missing or damaged, or vectors are those of another embedding model."""


class QuestionError(RagCacheError):
    """The question is empty, no Unicode, or alone too long for the model's context window."""


class EvaluationError(RagCacheError):
    """An evaluation cannot be run: its questions, its grid or its files cannot be used."""


class PassageError(RagCacheError):
    """A passage from outside the store cannot be used."""


class StreamClosedError(RagCacheError):
    """An answer was asked of a stream that was closed before its end."""


class DocumentNotFoundError(RagCacheError):
    """The store holds no document of that id."""
