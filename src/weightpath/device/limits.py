"""What control groups leave of a machine: CPU quota, cpuset and memory, v2 and v1.

    memory available = min(MemAvailable, limit - current + inactive_file)   over every level

A limit binds a group and everything under it, so the process's own group (/proc/self/cgroup) and
all its parents are read. inactive_file is page cache that the kernel drops before it refuses
memory. Inside a container the path of /proc/self/cgroup may not exist under the mount: the
levels that do exist are the container's own. Format: Documentation/admin-guide/cgroup-v2.rst
and cgroup-v1/memory.rst of the Linux kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weightpath.device.files import NOT_READABLE, cpu_ids, read_number, read_text

_MOUNT = "sys/fs/cgroup"
_NO_LIMIT = 1 << 60  # v1 writes "none" as a number just under 2**63


@dataclass(frozen=True)
class Memory:
    """RAM in bytes, cgroup limits honoured, each with its source; 0 where it is not known."""

    total: int
    total_source: str
    available: int
    available_source: str


def _levels(root: Path, controller: str) -> Iterator[tuple[int, str]]:
    """(version, folder) of the process's group and every parent, deepest first."""
    lines = read_text(root, "proc/self/cgroup").splitlines() or ["0::/", f"1:{controller}:/"]
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            version, mounts = 2, (_MOUNT, f"{_MOUNT}/unified")
        elif controller in controllers.split(","):
            version = 1
            mounts = tuple(dict.fromkeys((f"{_MOUNT}/{controllers}", f"{_MOUNT}/{controller}")))
        else:
            continue
        steps = [step for step in path.split("/") if step not in ("", "..")]
        for mount in mounts:
            for depth in range(len(steps), -1, -1):
                yield version, "/".join([mount, *steps[:depth]])


def cpu_quota(root: Path) -> tuple[float | None, str]:
    """CPUs' worth of time that the tightest group allows, or None where nothing limits it."""
    found: list[tuple[float, str]] = []
    for version, folder in _levels(root, "cpu"):
        if version == 2:
            quota, _, period = read_text(root, f"{folder}/cpu.max").partition(" ")
            source = "cgroup v2 cpu.max"
        else:
            quota = read_text(root, f"{folder}/cpu.cfs_quota_us")
            period = read_text(root, f"{folder}/cpu.cfs_period_us")
            source = "cgroup v1 cpu.cfs_quota_us"
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            found.append((int(quota) / int(period), source))
    return min(found, default=(None, "no cgroup quota"))


def cpuset(root: Path) -> tuple[frozenset[int] | None, str]:
    """Cpus that the process's own group may use, or None where no cpuset says."""
    for version, folder in _levels(root, "cpuset"):
        name = "cpuset.cpus.effective" if version == 2 else "cpuset.effective_cpus"
        ids = cpu_ids(read_text(root, f"{folder}/{name}"))
        if ids:
            return frozenset(ids), f"cgroup v{version} {name}"
    return None, "no cpuset"


def memory(root: Path) -> Memory:
    """RAM of the machine, or of the tightest memory group where that is less."""
    info = _meminfo(root)
    total, total_source = info.get("MemTotal", 0), "/proc/meminfo MemTotal"
    if "MemAvailable" in info:
        free, free_source = info["MemAvailable"], "/proc/meminfo MemAvailable"
    else:  # kernels before 3.14
        free = sum(info.get(key, 0) for key in ("MemFree", "Buffers", "Cached"))
        free_source = "/proc/meminfo MemFree + Buffers + Cached"
    totals = [(total, total_source)] if total else []
    frees = [(free, free_source)] if total else []
    for version, folder in _levels(root, "memory"):
        limit_name, usage_name, stat_key = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        limit = read_number(root, f"{folder}/{limit_name}")
        if limit is None or not 0 <= limit < _NO_LIMIT:
            continue
        source = f"cgroup v{version} {limit_name}"
        totals.append((limit, source))
        usage = read_number(root, f"{folder}/{usage_name}")
        if usage is None:
            frees.append((limit, f"{source}, its use not readable"))
        else:
            left = limit - usage + _stat(root, f"{folder}/memory.stat", stat_key)
            frees.append((min(limit, max(0, left)), f"{source} - use + {stat_key}"))
    return Memory(*min(totals, default=(0, NOT_READABLE)), *min(frees, default=(0, NOT_READABLE)))


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes (the file counts KiB)."""
    found: dict[str, int] = {}
    for line in read_text(root, "proc/meminfo").splitlines():
        key, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdecimal():
            found[key.strip()] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def _stat(root: Path, path: str, key: str) -> int:
    for line in read_text(root, path).splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.isdecimal():
            return int(value)
    return 0
