"""How every verb shows itself: results on stdout, progress and messages on stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

stdout = Console(soft_wrap=True, highlight=False)
stderr = Console(stderr=True, highlight=False)


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
    """A bar on stderr; the yielded function takes (label, done, total). A label's first word names
    the task, so one bar serves "quantizing a", "quantizing b", ..."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=stderr, transient=not sys.stderr.isatty()) as bar:
        tasks: dict[str, Any] = {}

        def update(label: str, done: int, total: int) -> None:
            key = label.split(":")[0].split(" ")[0]
            if key not in tasks:
                tasks[key] = bar.add_task(label, total=total)
            bar.update(tasks[key], description=label, completed=done, total=total)

        yield update


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
