"""A LlamaIndex query engine whose answers come from stored states.

python examples/batch_index.py --store /tmp/harbour
python examples/llama_index_query_engine.py --store /tmp/harbour "How tall is the lighthouse?"
"""

from __future__ import annotations

import argparse
from pathlib import Path

from llama_index.core.query_engine import RetrieverQueryEngine

from ragcache import RagCache
from ragcache.llama_index import RagCacheLLM, RagCacheRetriever, RagCacheSynthesizer


def main() -> None:
    """Ask one question and show which tokens were not prefilled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True, help="folder of the state store")
    parser.add_argument("question", nargs="?", default="How tall is the lighthouse?")
    arguments = parser.parse_args()

    cache = RagCache.open(arguments.store)
    engine = RetrieverQueryEngine(
        retriever=RagCacheRetriever(cache, similarity_top_k=3),
        response_synthesizer=RagCacheSynthesizer(RagCacheLLM(cache, max_tokens=64)),
    )
    response = engine.query(arguments.question)

    print(response)
    for node in response.source_nodes:
        print(f"  {node.score:.2f}  {node.node_id}")
    tokens = (response.metadata or {})["ragcache"]["tokens"]
    print(f"  {tokens['restored']} tokens restored, {tokens['prefilled']} prefilled")


if __name__ == "__main__":
    main()
