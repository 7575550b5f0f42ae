"""A transformer, seen as "states in, KV out".

With `ragcache.llama_index`, the only room that knows how the transformers library works inside: its cache
classes, its attention interface, its rotary modules.
"""
