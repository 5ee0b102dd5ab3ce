"""This package's models in a process of their own; run by its own environment.

    {"do": "load", "folder", "threads", "engine", "context", "activation_bits",
     "cache": true} -> {"load_seconds", "first_seconds", "from_cache", "anonymous_bytes"}
    {"do": "speed", "prompt": [ids], "steps"}
        -> {"prefill_seconds", "decode_seconds", "tokens": [ids]}
    {"do": "versions"} -> {"weightpath"}

engine and cache as in `weightpath.load`. anonymous_bytes: RssAnon after the first token. first_seconds: from the request to the first token of a prompt of
FIRST ids; imports are done by then, in every worker. prefill_seconds: reading a prompt into an empty
cache, and its argmax. decode_seconds: `steps` more tokens, each the most likely after the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from loop import answer
from torch import Tensor

from weightpath.engine.load import load
from weightpath.engine.session import open_session
from weightpath.version import __version__

FIRST = 8
Extend = Callable[[Sequence[int]], Tensor]
"""Reads ids into the cache and gives the logits [vocabulary] after the last."""


def opened(
    folder: str, engine: str, context: int, activation_bits: int, cache: bool
) -> tuple[Callable[[], Extend], bool]:
    """A function that begins an empty session, and whether packed weights were mapped."""
    model: Any = load(folder, engine=engine, activation_bits=activation_bits, cache=cache)
    return lambda: open_session(model, context).extend, model.weightpath.from_cache


def anonymous_bytes() -> int:
    """RssAnon of this process; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    found = [int(line.split()[1]) for line in lines if line.startswith("RssAnon")]
    return 1024 * sum(found)


def main() -> None:
    """Answer until the input ends."""
    begin: Callable[[], Extend] | None = None

    def first(
        folder: str,
        threads: int,
        engine: str,
        context: int,
        activation_bits: int,
        cache: bool = True,
    ) -> dict[str, Any]:
        nonlocal begin
        start = time.perf_counter()
        torch.set_num_threads(threads)
        begin, from_cache = opened(folder, engine, context, activation_bits, cache)
        loaded = time.perf_counter()
        int(begin()(range(FIRST)).argmax())
        first_seconds = time.perf_counter() - start
        return {
            "load_seconds": loaded - start, "first_seconds": first_seconds,
            "from_cache": from_cache, "anonymous_bytes": anonymous_bytes(),
        }  # fmt: skip

    def speed(prompt: list[int], steps: int) -> dict[str, Any]:
        assert begin is not None
        extend = begin()
        start = time.perf_counter()
        tokens = [int(extend(prompt).argmax())]
        middle = time.perf_counter()
        for _ in range(steps):
            tokens.append(int(extend(tokens[-1:]).argmax()))
        end = time.perf_counter()
        return {
            "prefill_seconds": middle - start,
            "decode_seconds": end - middle,
            "tokens": tokens,
        }

    answer(
        {
            "load": first,
            "speed": speed,
            "versions": lambda: {"weightpath": __version__},
        }
    )


if __name__ == "__main__":
    main()
