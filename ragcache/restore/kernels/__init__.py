"""Restoring on NVIDIA GPUs: one Triton kernel for each form of states.

Each kernel reads encoded states and writes keys and values into the KV cache, with nothing in between in memory. They
compute what `ragcache.restore.twins` does. Import this on machines with a GPU only: loading Triton takes seconds.
"""

from ragcache.restore.kernels.hidden import restore_hidden
from ragcache.restore.kernels.pre_rope_kv import restore_pre_rope_kv

__all__ = ["restore_hidden", "restore_pre_rope_kv"]
