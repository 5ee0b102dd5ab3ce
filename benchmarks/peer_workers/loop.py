"""The side of a worker that answers: one JSON object a line in, one out, until the input ends.

A request names what to do; the rest of it are that function's arguments. What the function returns
is the answer, or {"error": sentence} where it raised. Whatever else a library writes to stdout goes
to stderr, so that a line is always an answer. Plain Python, for workers run by other environments.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def answer(functions: dict[str, Callable[..., dict[str, Any]]]) -> None:
    """Answer requests {"do": name, **arguments} by these functions."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            done = functions[request.pop("do")](**request)
        except Exception as refused:  # told to the parent, which says it or ends with it
            done = {"error": f"{type(refused).__name__}: {' '.join(str(refused).split())}"}
        answers.write(json.dumps(done) + "\n")
        answers.flush()
