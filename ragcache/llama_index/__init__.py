"""The LlamaIndex integration: an LLM, a retriever and a response synthesizer around one opened store.

In LlamaIndex only text reaches an LLM; node ids and scores stop at the response synthesizer. So that is where stored
states come in.
"""

from ragcache.llama_index.llm import RagCacheLLM
from ragcache.llama_index.retriever import RagCacheRetriever
from ragcache.llama_index.synthesizer import RagCacheSynthesizer

__all__ = ["RagCacheLLM", "RagCacheRetriever", "RagCacheSynthesizer"]
