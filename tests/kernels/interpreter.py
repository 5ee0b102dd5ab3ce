"""Triton's interpreter for tests: importing this module makes Triton run kernels on the CPU.

Import it before any kernel, in a process of its own: a kernel is made for the interpreter or for a
device when it is defined. NumPy 2.4 no longer takes an array of one element for a Python integer, which
Triton 3.6's interpreter hands to a loop whose bounds were loaded; that is mended here.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter

_as_shipped = interpreter._patch_lang_tensor


def _with_loop_bounds(tensor: Any, scope: Any) -> None:
    _as_shipped(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _with_loop_bounds
