"""The same LlamaIndex pipeline twice, with a HuggingFaceLLM and with ragcache: answers and times side by side.

pip install llama-index-llms-huggingface
python examples/llama_index_quickstart.py --store /tmp/quickstart

The first run encodes the documents, some pages of the Python reference, about two minutes on 2 cores. What `plain` and
`with_ragcache` differ in are two lines.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import StreamingResponse
from llama_index.core.node_parser import SentenceSplitter
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from llama_index.llms.huggingface import HuggingFaceLLM

from ragcache import RagCache
from ragcache.llama_index import RagCacheLLM, RagCacheSynthesizer
from ragcache.model.gguf import convert
from ragcache.model.resolve import resolve
from ragcache.settings import load_settings

PAGES = ("with", "try", "import", "class", "async", "raise", "comparisons")
QUESTIONS = (
    "What does the finally clause do?",
    "What does the async with statement do?",
    "What is a class decorator?",
)
TOP_K = 5
MAX_TOKENS = 48
HUGGINGFACE = {"context_window": 8192, "is_chat_model": True, "generate_kwargs": {"do_sample": False}}


class Asked(NamedTuple):
    """An answer, and when it came."""

    text: str
    first_token_seconds: float
    prefilled: int | None


def plain(documents: list[Document], model: str, store: Path) -> BaseQueryEngine:
    """What a user has today."""
    index = VectorStoreIndex.from_documents(documents)
    llm = HuggingFaceLLM(model_name=model, tokenizer_name=model, max_new_tokens=MAX_TOKENS, **HUGGINGFACE)
    return index.as_query_engine(similarity_top_k=TOP_K, streaming=True, llm=llm)


def with_ragcache(documents: list[Document], model: str, store: Path) -> BaseQueryEngine:
    """The same with stored states."""
    index = VectorStoreIndex.from_documents(documents)
    llm = RagCacheLLM(RagCache.from_index(index, store, model=model), max_tokens=MAX_TOKENS)
    return index.as_query_engine(
        similarity_top_k=TOP_K, response_synthesizer=RagCacheSynthesizer(llm, streaming=True), llm=llm
    )


def ask(engine: BaseQueryEngine, question: str) -> Asked:
    """Ask, and take the time to the first token."""
    clock = time.perf_counter()
    response = engine.query(question)
    if not isinstance(response, StreamingResponse) or response.response_gen is None:
        raise SystemExit("the engine does not stream")
    pieces = iter(response.response_gen)
    text = next(pieces)
    first = time.perf_counter() - clock
    text += "".join(pieces)
    report = (response.metadata or {}).get("ragcache")
    return Asked(text.strip(), first, report and report["tokens"]["prefilled"])


def local_folder(model: str) -> str:
    """A folder that transformers reads; packaged models come as a GGUF file."""
    path = resolve(model)
    return str(convert(path, "bfloat16", load_settings().cache_folder) if path.is_file() else path)


def main() -> None:
    """Ask both engines the same questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True, help="folder of the state store")
    parser.add_argument("--model", default="smollm2-135m", help="hub id, folder, GGUF file or alias")
    arguments = parser.parse_args()

    Settings.embed_model = HuggingFaceEmbedding(str(resolve("all-minilm-l6-v2")))
    Settings.node_parser = SentenceSplitter(chunk_size=512, chunk_overlap=0)
    documents = [Document(text=topics[page], id_=page, metadata={"page": page}) for page in PAGES]

    model = local_folder(arguments.model)
    engines = [make(documents, model, arguments.store) for make in (plain, with_ragcache)]
    for question in QUESTIONS:
        before, after = (ask(engine, question) for engine in engines)
        ratio = before.first_token_seconds / after.first_token_seconds
        print(f"{question}\n  HuggingFaceLLM  {before.first_token_seconds * 1e3:7.0f} ms  {before.text}")
        print(f"  ragcache        {after.first_token_seconds * 1e3:7.0f} ms  {after.text}")
        print(f"  first token {ratio:.1f} times sooner, {after.prefilled} tokens prefilled\n")


if __name__ == "__main__":
    main()
