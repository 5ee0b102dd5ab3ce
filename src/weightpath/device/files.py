"""Reading small kernel files under a root that tests can inject.

Nothing here raises for a file that is absent or unreadable: it reads as empty, and the caller's
source then says that the fact could not be read.
"""

from __future__ import annotations

from pathlib import Path

_MOST_CPUS = 65_536  # more than the largest NR_CPUS that the kernel is built with
NOT_READABLE = "default: not readable"


def read_text(root: Path, path: str) -> str:
    """Contents of root/path, stripped of white space and NULs; empty where it cannot be read."""
    try:
        raw = (root / path).read_bytes()
    except OSError:
        return ""
    return raw.decode("utf-8", errors="replace").strip("\0 \t\r\n")


def read_number(root: Path, path: str) -> int | None:
    """Contents of root/path as a whole number (0x... too), or None."""
    try:
        return int(read_text(root, path), 0)
    except ValueError:
        return None


def exists(root: Path, path: str) -> bool:
    """Whether root/path is there; False also where looking is not allowed."""
    try:
        return (root / path).exists()
    except OSError:
        return False


def names(root: Path, path: str) -> list[str]:
    """Names in the folder root/path, sorted; empty where it cannot be listed."""
    try:
        return sorted(entry.name for entry in (root / path).iterdir())
    except OSError:
        return []


def cpu_ids(text: str) -> tuple[int, ...]:
    """The kernel's cpu list ("0-3,8") as ascending ids; empty where it is not one."""
    found: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.strip().partition("-")
            start, stop = int(first), int(last or first) + 1
            if not 0 <= start < stop <= _MOST_CPUS:
                return ()
            found.update(range(start, stop))
    except ValueError:
        return ()
    return tuple(sorted(found))


def device_tree(root: Path, name: str) -> tuple[str, ...]:
    """Strings of a device-tree property of the board, such as model or compatible."""
    for folder in ("sys/firmware/devicetree/base", "proc/device-tree"):
        text = read_text(root, f"{folder}/{name}")
        if text:
            return tuple(part for part in text.split("\0") if part)
    return ()
