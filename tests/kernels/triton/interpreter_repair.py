"""Triton 3.6's interpreter with numpy 2.4 and above, on import.

A run-time number is an array of one element there, and `range` makes it an index by int(array), which
numpy no longer does for an array of a dimension.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_before = interpreter._patch_lang_tensor


def _patch(tensor: Any, scope: Any) -> None:
    _before(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch
