"""Triton kernels of a decode step: norms, activation, attention over the cache, the next token.

Import its modules only where they are to run (step.py does): they import Triton.
"""

from __future__ import annotations

import os


def interpreted() -> bool:
    """Whether Triton was asked to run its kernels in its interpreter, on the CPU, as tests do."""
    return os.environ.get("TRITON_INTERPRET") == "1"
