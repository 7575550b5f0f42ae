"""Prompts that were prefilled in full, remembered: their chunks in the same order are served exactly.

A tree of chunks (the knowledge tree of RAGCache, arXiv 2404.12457, section 5.1). A node holds the keys and values of
its chunk after just the chunks on the way from the root, which is the prompt's prefix. Where bytes are short, leaves go
first, by GreedyDual-Size-Frequency (section 5.1 there, `ragcache.states.eviction` here).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch import Tensor

from ragcache.errors import NotEnoughMemoryError
from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel
from ragcache.model.memory import memory_for
from ragcache.prompt.layout import Layout


@dataclass(frozen=True)
class SequenceReport:
    """What is remembered of prompts, and how it served.

    Attributes:
        chunks: remembered now; a chunk counts once for each sequence of others before it.
        bytes: of their keys and values.
        taken: chunks ever remembered.
        served: chunks copied into prompts.
        evicted: chunks given up for others.
        refused: chunks not remembered because there was too little room, and what is there is worth more or is needed.
        out_of_memory: chunks not remembered because the machine's memory was short.
    """

    chunks: int = 0
    bytes: int = 0
    taken: int = 0
    served: int = 0
    evicted: int = 0
    refused: int = 0
    out_of_memory: int = 0


@dataclass(eq=False)
class _Node:
    """A chunk after its ancestors.

    Attributes:
        token_ids: of the chunk.
        parent: the chunk before it; `None` for the root, and for what was evicted.
        keys: one tensor per layer, `[kv_heads, tokens, head_dim]`. They are never written to again.
        values: likewise.
        saved: FLOPs of prefilling it after its ancestors, per byte.
        uses: prompts that wanted it.
        priority: what keeping it is worth.
        children: by their token ids.
    """

    token_ids: tuple[int, ...] = ()
    parent: _Node | None = None
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    saved: float = 0.0
    uses: int = 1
    priority: float = 0.0
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(it.nbytes for it in self.keys + self.values)


class SequenceMemory:
    """Keys and values of chunks in the order they were prefilled in; may be used by several threads at once."""

    def __init__(self, model: LanguageModel, prefix: tuple[int, ...], limit: int) -> None:
        """Remember nothing yet.

        Args:
            model: the model whose keys and values they are.
            prefix: token ids that all prompts start with; prompts with another prefix are left alone.
            limit: bytes that may be taken up, on the model's device; with 0 nothing is remembered. What a request is
                copying while it is evicted comes on top for that time.
        """
        self._model = model
        self._prefix = prefix
        self._limit = limit
        self._lock = threading.Lock()
        self._root = _Node()
        self._clock = 0.0
        self._counts = SequenceReport()

    @property
    def report(self) -> SequenceReport:
        """What is remembered now, and what happened so far."""
        with self._lock:
            return self._counts

    def recall(self, layout: Layout, cache: KVCache) -> int:
        """Copy the longest remembered sequence of a prompt's first chunks.

        Args:
            layout: the prompt.
            cache: holds the prefix. Afterwards it holds the chunks as well.

        Returns:
            How many of the layout's chunks that are.

        Raises:
            ValueError: the cache holds something else than the prefix.
        """
        if cache.length != len(layout.prefix):
            raise ValueError(f"the cache holds {cache.length} tokens, and the prefix has {len(layout.prefix)}")
        with self._lock:
            nodes = self._path(layout)
            for node in nodes:
                node.uses += 1
                node.priority = self._worth(node)
            self._count(served=len(nodes))
        for node in nodes:
            slots = slice(cache.length, cache.length + len(node.token_ids))
            for mine, theirs in zip(cache.keys + cache.values, node.keys + node.values, strict=True):
                mine[:, slots] = theirs
            cache.length = slots.stop
        return len(nodes)

    def remember(self, layout: Layout, cache: KVCache) -> None:
        """Copy the chunks of a prompt that are not remembered yet.

        Where there is no room for a chunk, those after it are not remembered either.

        Args:
            layout: the prompt.
            cache: its keys and values, all of them as a full prefill gives them.
        """
        if self._limit == 0 or layout.prefix != self._prefix:
            return
        path = [self._root]
        for token_ids, start in zip(layout.chunks, layout.starts, strict=True):
            # Others are let in between, since copying a chunk takes milliseconds.
            with self._lock:
                if len(path) > 1 and path[-1].parent is None:
                    return
                node = path[-1].children.get(token_ids) or self._add(token_ids, start, path, cache)
            if node is None:
                return
            path.append(node)

    def _path(self, layout: Layout) -> list[_Node]:
        """Nodes of the layout's first chunks, as far as they are remembered."""
        nodes: list[_Node] = []
        if layout.prefix == self._prefix:
            node = self._root
            for token_ids in layout.chunks:
                if token_ids not in node.children:
                    break
                node = node.children[token_ids]
                nodes.append(node)
        return nodes

    def _add(self, token_ids: tuple[int, ...], start: int, path: list[_Node], cache: KVCache) -> _Node | None:
        """Take in a chunk after those of a path; `None` if it cannot be."""
        slots = slice(start, start + len(token_ids))
        keys, values = ([it[:, slots] for it in layers] for layers in (cache.keys, cache.values))
        node = _Node(token_ids, path[-1], keys, values)
        node.saved = self._model.prefill_flops(start, len(token_ids)) / node.bytes
        node.priority = self._worth(node)
        if not self._make_room(node, path):
            self._count(refused=1)
            return None
        try:
            with memory_for("remembering a prompt"):
                node.keys, node.values = ([it.clone() for it in layers] for layers in (keys, values))
        except NotEnoughMemoryError:
            self._count(out_of_memory=1)
            return None
        path[-1].children[token_ids] = node
        self._count(chunks=1, bytes=node.bytes, taken=1)
        return node

    def _make_room(self, newcomer: _Node, path: list[_Node]) -> bool:
        """Evict the leaves of least priority until a new chunk fits; none at all if it is itself of least priority.

        What the newcomer comes after stays in any case.
        """
        victims: list[_Node] = []
        short = self._counts.bytes + newcomer.bytes - self._limit
        while short > 0:
            leaves = [
                node
                for node in self._nodes()
                if node not in path and node not in victims and all(it in victims for it in node.children.values())
            ]
            if newcomer.bytes > self._limit or not leaves:
                return False
            victim = min(leaves, key=lambda leaf: leaf.priority)
            if newcomer.priority < victim.priority:
                self._clock = max(self._clock, newcomer.priority)
                return False
            victims.append(victim)
            short -= victim.bytes
        for victim in victims:
            self._forget(victim)
        return True

    def _nodes(self) -> Iterator[_Node]:
        """All but the root, parents before their children."""
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            yield node

    def _forget(self, leaf: _Node) -> None:
        # What goes sets the clock, so whatever is used from now on is worth more than it, and the rest is overtaken.
        self._clock = max(self._clock, leaf.priority)
        if leaf.parent is not None:
            del leaf.parent.children[leaf.token_ids]
            leaf.parent = None
        self._count(chunks=-1, bytes=-leaf.bytes, evicted=1)

    def _worth(self, node: _Node) -> float:
        return self._clock + node.uses * node.saved

    def _count(self, **changes: int) -> None:
        counts = self._counts
        self._counts = replace(counts, **{name: getattr(counts, name) + by for name, by in changes.items()})
