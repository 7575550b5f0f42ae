"""KV caches that finished requests leave for the next ones."""

from __future__ import annotations

import threading

from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel

GRANULE = 512
"""Capacities are multiples of this, so that prompts of similar length can share a cache."""

KEPT = 2
"""Caches kept for later."""


class CachePool:
    """Hands out KV caches and takes them back.

    A fresh buffer costs a page fault for every 4 KiB written, a good tenth of the time to restore it; a used one
    does not. Old content cannot show through: a cache starts at length 0 and nothing reads beyond its length.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._idle: list[KVCache] = []

    def take(self, capacity: int) -> KVCache:
        """An empty cache with room for at least `capacity` tokens."""
        with self._lock:
            fitting = [cache for cache in self._idle if cache.capacity >= capacity]
            if fitting:
                smallest = min(fitting, key=lambda cache: cache.capacity)
                self._idle = [cache for cache in self._idle if cache is not smallest]
                smallest.length = 0
                return smallest
        return self._model.new_cache(-(-capacity // GRANULE) * GRANULE)

    def give_back(self, cache: KVCache) -> None:
        """Return a cache that nobody uses any more; the largest are kept."""
        with self._lock:
            self._idle = sorted([*self._idle, cache], key=lambda idle: -idle.capacity)[:KEPT]
