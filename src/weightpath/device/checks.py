"""Types of the values in a profile's JSON: each check returns the value or raises Wrong.

A true or false is not a number here, though Python counts it as one.
"""

from __future__ import annotations


class Wrong(Exception):
    """A value of the wrong type; the caller names the key and what is accepted."""


def text(value: object) -> str:
    if not isinstance(value, str):
        raise Wrong
    return value


def flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise Wrong
    return value


def whole(value: object, least: int = 0, most: int = 1 << 62) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise Wrong
    return value


def items(value: object) -> list[object]:
    if not isinstance(value, list | tuple):
        raise Wrong
    return list(value)


def texts(value: object) -> tuple[str, ...]:
    return tuple(text(item) for item in items(value))


def pair(value: object) -> tuple[int, int]:
    numbers = [whole(item) for item in items(value)]
    if len(numbers) != 2:
        raise Wrong
    return numbers[0], numbers[1]


def clusters(value: object) -> tuple[tuple[int, ...], ...]:
    """Lists of cpu ids, no id twice."""
    found = tuple(tuple(whole(cpu) for cpu in items(part)) for part in items(value))
    every = [cpu for cluster in found for cpu in cluster]
    if len(set(every)) != len(every):
        raise Wrong
    return found


def shown(value: object) -> str:
    """A value for a one-line message, cut short."""
    written = repr(value)
    return written if len(written) <= 60 else written[:57] + "..."
