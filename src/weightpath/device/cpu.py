"""The processor of a Linux machine, from /proc/cpuinfo and /sys/devices/system under a root.

Every reader returns (fact, source). Formats: Documentation/admin-guide/cputopology.rst and
Documentation/ABI/testing/sysfs-devices-system-cpu of the Linux kernel.
"""

from __future__ import annotations

import platform
from collections import Counter
from pathlib import Path

from weightpath.device.files import (
    NOT_READABLE,
    cpu_ids,
    device_tree,
    names,
    read_number,
    read_text,
)
from weightpath.device.profile import normalise_arch, normalise_flags

_SYS_CPU = "sys/devices/system/cpu"

# (implementer, part) of MIDR_EL1 -> core, from Arm's technical reference manuals and the kernel's
# cputype.h; the cores that a machine of interest is likely to have.
_ARM_PARTS = {
    0x41: {
        0xD03: "Cortex-A53", 0xD04: "Cortex-A35", 0xD05: "Cortex-A55", 0xD07: "Cortex-A57",
        0xD08: "Cortex-A72", 0xD09: "Cortex-A73", 0xD0A: "Cortex-A75", 0xD0B: "Cortex-A76",
        0xD0C: "Neoverse-N1", 0xD0D: "Cortex-A77", 0xD40: "Neoverse-V1", 0xD41: "Cortex-A78",
        0xD42: "Cortex-A78AE", 0xD44: "Cortex-X1", 0xD46: "Cortex-A510", 0xD47: "Cortex-A710",
        0xD48: "Cortex-X2", 0xD49: "Neoverse-N2", 0xD4A: "Neoverse-E1", 0xD4B: "Cortex-A78C",
        0xD4D: "Cortex-A715", 0xD4E: "Cortex-X3", 0xD4F: "Neoverse-V2", 0xD80: "Cortex-A520",
        0xD81: "Cortex-A720", 0xD82: "Cortex-X4", 0xD84: "Neoverse-V3", 0xD85: "Cortex-X925",
        0xD87: "Cortex-A725", 0xD8E: "Neoverse-N3",
    },
    0x46: {0x001: "A64FX"},
    0x48: {0xD01: "Kunpeng-920"},
    0x4E: {0x003: "Denver 2", 0x004: "Carmel"},
    0x51: {0x001: "Oryon", 0x802: "Kryo 3xx Gold", 0x803: "Kryo 3xx Silver",
           0x804: "Kryo 4xx Gold", 0x805: "Kryo 4xx Silver"},
    0x61: {0x022: "Icestorm-M1", 0x023: "Firestorm-M1", 0x032: "Blizzard-M2",
           0x033: "Avalanche-M2"},
    0xC0: {0xAC3: "Ampere-1", 0xAC4: "Ampere-1a"},
}  # fmt: skip

Blocks = list[dict[str, str]]


def read_cpuinfo(root: Path) -> Blocks:
    """/proc/cpuinfo as one dictionary a block, keys in lower case; empty where unreadable."""
    blocks: Blocks = []
    for part in read_text(root, "proc/cpuinfo").replace("\r", "").split("\n\n"):
        lines = (line.partition(":") for line in part.splitlines() if ":" in line)
        block = {key.strip().lower(): value.strip() for key, _, value in lines}
        if block:
            blocks.append(block)
    return blocks


def arch(root: Path, blocks: Blocks, live: bool) -> tuple[str, str]:
    """Architecture: the running kernel's on the live root, else told from the files."""
    if live:
        return normalise_arch(platform.machine()), "platform.machine()"
    named = read_text(root, "proc/sys/kernel/arch")
    if named:
        return normalise_arch(named), "/proc/sys/kernel/arch"
    source = "/proc/cpuinfo format"
    for block in blocks:
        if "flags" in block:
            return ("x86_64" if "lm" in block["flags"].split() else "i686"), source
        if "cpu implementer" in block:
            wide = block.get("cpu architecture", "8") not in ("5", "6", "7")
            return ("aarch64" if wide else "armv7l"), source
        if block.get("isa", "")[:4] in ("rv64", "rv32"):
            return f"riscv{block['isa'][2:4]}", source
    return "unknown", NOT_READABLE


def flags(machine: str, blocks: Blocks) -> tuple[frozenset[str], str]:
    """Normalised flags that every listed cpu has, so that a thread may run on any of them."""
    key = "flags" if machine in ("x86_64", "i686") else "features"
    label = "flags" if key == "flags" else "Features"
    if machine.startswith("riscv"):
        key, label = "isa", "isa"
    sets = [set(_split_flags(key, block[key])) for block in blocks if key in block]
    if not sets:
        return frozenset(), f"default: /proc/cpuinfo has no {label} line"
    return normalise_flags(set.intersection(*sets)), f"/proc/cpuinfo {label}"


def _split_flags(key: str, text: str) -> list[str]:
    if key != "isa":
        return text.split()
    first, *rest = text.lower().split("_")  # rv64imafdcv_zba_zbb
    return [*first[4:], *rest]


def model(root: Path, blocks: Blocks) -> tuple[str, str]:
    """Model name; on Arm the cores by name with the board, fastest-numbered cores first."""
    parts: Counter[str] = Counter()
    for block in blocks:
        if "model name" in block and "cpu part" not in block:
            return block["model name"], "/proc/cpuinfo model name"
        if "cpu implementer" in block and "cpu part" in block:
            parts[_arm_core(block["cpu implementer"], block["cpu part"])] += 1
    board = (device_tree(root, "model") or ("",))[0]
    if parts:
        several = len(parts) > 1
        cores = " + ".join(
            f"{count} x {core}" if several else core for core, count in reversed(parts.items())
        )
        source = "/proc/cpuinfo CPU part"
        return (f"{cores} ({board})", f"{source}, device tree") if board else (cores, source)
    for block in blocks:
        for key in ("uarch", "cpu", "cpu model"):
            if key in block:
                return block[key], f"/proc/cpuinfo {key}"
    return (board, "device tree model") if board else ("", NOT_READABLE)


def _arm_core(implementer: str, part: str) -> str:
    try:
        known = _ARM_PARTS[int(implementer, 0)][int(part, 0)]
    except (ValueError, KeyError):
        known = f"Arm implementer {implementer} part {part}"
    return known


def online(root: Path, blocks: Blocks) -> tuple[tuple[int, ...], str]:
    """Ids of the cpus that are on: the kernel's list, else the processor lines of cpuinfo."""
    ids = cpu_ids(read_text(root, f"{_SYS_CPU}/online"))
    if ids:
        return ids, f"/{_SYS_CPU}/online"
    listed = [block["processor"] for block in blocks if block.get("processor", "").isdecimal()]
    if listed:
        return tuple(sorted({int(item) for item in listed})), "/proc/cpuinfo processor lines"
    return (0,), NOT_READABLE


def physical_cores(root: Path, blocks: Blocks, ids: tuple[int, ...]) -> tuple[int, str]:
    """Cores behind the cpus `ids`: cpus that share a core count once."""
    for name in ("core_cpus_list", "thread_siblings_list"):
        siblings = [read_text(root, f"{_SYS_CPU}/cpu{cpu}/topology/{name}") for cpu in ids]
        if all(siblings):
            return len({cpu_ids(text) for text in siblings}), f"/{_SYS_CPU} topology/{name}"
    keys = [_core_key(root, cpu) for cpu in ids]
    if all(key is not None for key in keys):
        return len(set(keys)), f"/{_SYS_CPU} topology/core_id"
    by_id = {block.get("processor"): block for block in blocks}
    listed = [by_id.get(str(cpu), {}) for cpu in ids]
    if all("core id" in block for block in listed):
        pairs = {(block.get("physical id", "0"), block["core id"]) for block in listed}
        return len(pairs), "/proc/cpuinfo core id"
    return len(ids), "default: one core a cpu, topology not readable"


def _core_key(root: Path, cpu: int) -> tuple[int | None, ...] | None:
    folder = f"{_SYS_CPU}/cpu{cpu}/topology"
    core = read_number(root, f"{folder}/core_id")
    if core is None:
        return None
    wider = ("physical_package_id", "die_id", "cluster_id")  # a core_id is unique inside these
    return (core, *(read_number(root, f"{folder}/{name}") for name in wider))


def clusters(root: Path, ids: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], ...], str]:
    """Cpus of equal maximum frequency, fastest first; cpu_capacity where there is no cpufreq."""
    for name, label in (
        ("cpufreq/cpuinfo_max_freq", "cpufreq/cpuinfo_max_freq"),
        ("cpu_capacity", "cpu_capacity (no cpufreq)"),
    ):
        speeds = {cpu: read_number(root, f"{_SYS_CPU}/cpu{cpu}/{name}") for cpu in ids}
        groups: dict[int, list[int]] = {}
        for cpu, speed in speeds.items():
            if speed is not None:
                groups.setdefault(speed, []).append(cpu)
        if None not in speeds.values():
            ordered = sorted(groups, reverse=True)
            return tuple(tuple(groups[speed]) for speed in ordered), f"/{_SYS_CPU} {label}"
    return (ids,), "default: one cluster, neither cpufreq nor cpu_capacity readable"


def numa_nodes(root: Path, ids: tuple[int, ...]) -> tuple[int, str]:
    """NUMA nodes that hold a usable cpu (a node of memory alone runs nothing)."""
    folder = "sys/devices/system/node"
    nodes = [name for name in names(root, folder) if name[:4] == "node" and name[4:].isdecimal()]
    lists = [set(cpu_ids(read_text(root, f"{folder}/{node}/cpulist"))) for node in nodes]
    held = sum(1 for cpus in lists if not cpus.isdisjoint(ids))
    return (held, f"/{folder} cpulist") if held else (1, NOT_READABLE)


def l3_cache(root: Path, ids: tuple[int, ...]) -> tuple[int, str]:
    """Bytes of level-3 cache over the usable cpus, each shared cache once."""
    caches: dict[tuple[int, ...], int] = {}
    for cpu in ids:
        for index in names(root, f"{_SYS_CPU}/cpu{cpu}/cache"):
            folder = f"{_SYS_CPU}/cpu{cpu}/cache/{index}"
            size = read_text(root, f"{folder}/size")
            if read_number(root, f"{folder}/level") == 3 and size[:-1].isdecimal():
                shared = cpu_ids(read_text(root, f"{folder}/shared_cpu_list")) or (cpu,)
                caches[shared] = int(size[:-1]) << {"K": 10, "M": 20, "G": 30}.get(size[-1], 0)
    if caches:
        return sum(caches.values()), f"/{_SYS_CPU} cache/index*/size"
    return 0, "default: no L3 readable"
