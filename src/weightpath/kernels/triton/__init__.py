"""Products of low-bit weights in Triton, for CUDA devices of compute capability 8.0 and above.

`ops.py` is the door: its operators check what they are given and call the kernels beside it, which
import Triton; nothing else here does, so that importing weightpath needs no Triton and no CUDA.
"""
