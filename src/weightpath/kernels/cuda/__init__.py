"""Products on CUDA GPUs in CUDA C++, compiled at run time: nothing is compiled at install."""
