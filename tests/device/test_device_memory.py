"""Anonymous memory: what the process allocated, and not the files that it maps."""

from __future__ import annotations

import mmap
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from weightpath.device.memory import PeakMemory, rss_anon, rss_anon_source
from weightpath.errors import BadRequest

MIB = 1 << 20
SIZE = 96 * MIB
proc_only = pytest.mark.skipif(
    not Path("/proc/self/status").exists()
    or "RssAnon" not in Path("/proc/self/status").read_text(),
    reason="this kernel has no RssAnon",
)


def test_allocated_pages_are_counted() -> None:
    before = rss_anon()
    block = np.ones(SIZE, dtype=np.uint8)
    assert SIZE - MIB <= rss_anon() - before <= SIZE + 16 * MIB
    assert block[-1] == 1


@proc_only
def test_a_mapped_file_that_was_read_is_not_counted_though_vmrss_counts_it(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    path.write_bytes(b"\1" * SIZE)
    anonymous, resident = rss_anon(), psutil.Process().memory_info().rss
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert int(np.frombuffer(mapped, dtype=np.uint8)[::4096].sum()) == SIZE // 4096
        assert psutil.Process().memory_info().rss - resident > SIZE // 2
        assert rss_anon() - anonymous < 8 * MIB


@proc_only
def test_the_source_names_rssanon() -> None:
    assert rss_anon_source() == "/proc/<pid>/status RssAnon"


def test_the_peak_is_kept_after_the_memory_is_given_back() -> None:
    with PeakMemory(interval=0.002) as memory:
        block = np.ones(SIZE, dtype=np.uint8)
        time.sleep(0.05)
        del block
    assert memory.peak - memory.start >= SIZE - MIB
    assert rss_anon() < memory.peak - SIZE // 2
    assert memory.samples > 3


def test_idle_work_has_no_peak_to_speak_of() -> None:
    with PeakMemory(interval=0.005) as memory:
        time.sleep(0.03)
    assert 0 <= memory.peak - memory.start < 8 * MIB


def test_the_sampling_thread_ends_with_the_block_even_on_an_error() -> None:
    watcher = PeakMemory(interval=0.005)
    with pytest.raises(RuntimeError, match="boom"), watcher:
        raise RuntimeError("boom")
    assert not watcher._thread.is_alive()
    assert watcher.peak >= watcher.start > 0


def test_another_process_is_watched_until_it_ends() -> None:
    code = f"import time; b = bytearray(b'1') * {SIZE}; print('up', flush=True); time.sleep(0.1)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child, PeakMemory(interval=0.005, pid=child.pid) as memory:
        child.stdout.readline()
        assert rss_anon(child.pid) > SIZE
        child.wait()
    assert memory.peak > SIZE
    with pytest.raises(BadRequest, match=f"process {child.pid}: not running"):
        rss_anon(child.pid)


@pytest.mark.parametrize("interval", [0, -1.0, float("nan")])
def test_an_interval_that_is_not_above_zero_is_refused(interval: float) -> None:
    with pytest.raises(BadRequest, match="give a time above 0"):
        PeakMemory(interval=interval)
