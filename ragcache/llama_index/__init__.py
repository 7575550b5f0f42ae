"""The LlamaIndex integration: an LLM, a retriever and a response synthesizer around one opened store.

In LlamaIndex only text reaches an LLM; node ids and scores stop at the response synthesizer. So that is where stored
states come in.
"""

from ragcache.llama_index.encoder import StateEncoder
from ragcache.llama_index.llm import RagCacheLLM
from ragcache.llama_index.prompts import prompt_settings
from ragcache.llama_index.retriever import RagCacheRetriever
from ragcache.llama_index.synthesizer import RagCacheSynthesizer
from ragcache.llama_index.vector_store import RagCacheVectorStore

__all__ = [
    "RagCacheLLM",
    "RagCacheRetriever",
    "RagCacheSynthesizer",
    "RagCacheVectorStore",
    "StateEncoder",
    "prompt_settings",
]
