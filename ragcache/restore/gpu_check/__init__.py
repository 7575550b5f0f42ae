"""The kernels on a real GPU: whether they are right there, and how near they come to what the GPU can do.

`make gpu-check`, or `python -m ragcache.restore.gpu_check --output gpu-check.json`. It needs PyTorch and Triton, and
of ragcache only what the kernels themselves need. The tests run all of it with tiny shapes in Triton's interpreter.
"""
