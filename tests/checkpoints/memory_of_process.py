"""Anonymous memory of this process, from /proc; what a mapped file does not add to."""

from __future__ import annotations

import re
from pathlib import Path


def anonymous_bytes() -> int:
    """RssAnon in bytes."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found, "this kernel does not report RssAnon"
    return int(found[1]) * 1024
