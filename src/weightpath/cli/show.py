"""How every verb shows itself: results on stdout, progress and messages on stderr."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

stdout = Console(soft_wrap=True, highlight=False)
stderr = Console(stderr=True, highlight=False)

WORTH_A_LINE = 1.0
"""Seconds from which a finished task is worth a line where no bar can move."""


def emit_json(value: Any) -> None:
    """One JSON document on stdout. Infinities and NaN become null, which JSON lacks."""
    print(json.dumps(_plain(value), indent=2))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Bars on stderr; the yielded function takes (label, done, total).

    A label's first word names the task: "quantizing a" and "quantizing b" move one bar. A bar ends
    when its task is done, so that what is printed next stands below it. Where stderr is no
    terminal, a task that took a second or more leaves one line when it is done.
    """
    bar: Progress | None = None
    task, key = TaskID(0), ""
    started = 0.0

    def end() -> None:
        nonlocal bar, key
        if bar is not None:
            bar.stop()
        bar, key = None, ""

    def update(label: str, done: int, total: int) -> None:
        nonlocal bar, task, key, started
        word = label.replace(":", " ").split(" ")[0]
        if word != key:
            end()
            key, started = word, time.perf_counter()
            if stderr.is_terminal:
                bar = Progress(*_columns(), console=stderr)
                task = bar.add_task(label, total=total)
                bar.start()
        if bar is not None:
            bar.update(task, description=label, completed=done, total=total)
        if done >= total:
            seconds = time.perf_counter() - started
            if bar is None and seconds >= WORTH_A_LINE:
                stderr.print(f"{word:<12} [{'#' * 32}] 100%, {seconds:.1f} s", markup=False)
            end()

    try:
        yield update
    finally:
        end()


def _columns() -> tuple[ProgressColumn, ...]:
    return (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )


def heading(text: str) -> None:
    """A section's title on stdout."""
    stdout.print(f"\n[bold]{text}[/bold]")


def table(*headers: str) -> Table:
    """A borderless table; columns after the first are right-aligned."""
    made = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
    for index, header in enumerate(headers):
        made.add_column(header, justify="left" if index == 0 else "right", overflow="fold")
    return made


def size(count: float) -> str:
    """Bytes in a unit that reads well, decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError  # pragma: no cover


def interval(value: Any, digits: int = 4, percent: bool = False) -> str:
    """A value with its 95% interval: 0.0434 (0.0411 to 0.0460)."""
    scale = 100 if percent else 1
    mark = "%" if percent else ""
    low, middle, high = (
        f"{scale * part:.{digits}f}{mark}" for part in (value.low, value.value, value.high)
    )
    return f"{middle} ({low} to {high})"
