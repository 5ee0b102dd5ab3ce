"""Anonymous memory of a process: RssAnon, and its peak over a piece of work.

RssAnon is what the process allocated itself. VmRSS is never used: it counts the pages of a mapped
checkpoint that happen to be in memory, which belong to the page cache, and moves by gigabytes
between identical runs. The kernel keeps a high-water mark for VmRSS alone, so the peak of RssAnon
is sampled. Format: Documentation/filesystems/proc.rst of the Linux kernel.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

import psutil

from weightpath.errors import BadRequest

_KIB = 1024


def rss_anon(pid: int | None = None) -> int:
    """Anonymous resident bytes of this process, or of process `pid`.

    Error: BadRequest where no such process runs or it may not be read.
    """
    return _read(pid)[0]


def rss_anon_source(pid: int | None = None) -> str:
    """Where `rss_anon` gets its figure: RssAnon of /proc, or psutil's unique set size.

    The unique set size (macOS, Windows, kernels without RssAnon) also counts private pages of
    mapped files, so it is an upper bound.
    """
    return _read(pid)[1]


def _read(pid: int | None) -> tuple[int, str]:
    path = Path(f"/proc/{'self' if pid is None else pid}/status")
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * _KIB, "/proc/<pid>/status RssAnon"
    try:
        usage = psutil.Process(pid).memory_full_info()
    except psutil.NoSuchProcess:
        raise BadRequest(f"process {pid}: not running; give the id of a live process") from None
    except psutil.AccessDenied:
        raise BadRequest(f"process {pid}: memory may not be read; run as its owner") from None
    return usage.uss, "psutil memory_full_info uss"


class PeakMemory:
    """Peak of RssAnon while a block runs, sampled every `interval` seconds by a thread.

        with PeakMemory() as memory:
            work()
        memory.peak - memory.start    # bytes that the work added at its highest

    start: bytes on entry. peak: highest bytes seen, the two ends included. samples: how many
    readings. A rise that is shorter than the interval can be missed, as can one inside a call
    that holds the interpreter's lock. With `pid`, another process is watched; when that ends, the
    peak so far stays.
    """

    def __init__(self, interval: float = 0.01, pid: int | None = None) -> None:
        if not interval > 0:
            raise BadRequest(f"interval {interval} s: give a time above 0, such as 0.01")
        self.interval, self.pid = interval, pid
        self.start = self.peak = self.samples = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self.start = rss_anon(self.pid)
        self.peak, self.samples = self.start, 1
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._stop.wait(self.interval):
            if not self._sample():
                return

    def _sample(self) -> bool:
        """One reading; False where the watched process has ended."""
        try:
            now = rss_anon(self.pid)
        except BadRequest:
            return False
        self.peak = max(self.peak, now)
        self.samples += 1
        return True
