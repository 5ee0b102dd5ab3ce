"""Machines without /proc: macOS through sysctl, Windows through the platform module, psutil both.

What these systems do not tell stays at its default and says so: Windows has no list of CPU flags
but a call that knows a few of them, and macOS hides which core an id is.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess

import psutil

from weightpath.device.profile import (
    FACTS,
    Accelerator,
    HardwareProfile,
    float_support,
    normalise_arch,
    normalise_flags,
)

# IsProcessorFeaturePresent numbers, from winnt.h
_WINDOWS_FEATURES = {40: "avx2", 41: "avx512f", 19: "neon", 43: "dotprod"}


def probe_without_proc() -> HardwareProfile:
    """The running machine's profile where there is no /proc."""
    if platform.system() == "Darwin":
        return from_sysctl(read_sysctl(), psutil.virtual_memory().available)
    return from_platform(_windows_flags())


def read_sysctl() -> dict[str, str]:
    """Every kernel value of macOS by name; empty where sysctl cannot be run."""
    try:
        done = subprocess.run(
            ["/usr/sbin/sysctl", "-a"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    pairs = (line.partition(":") for line in done.stdout.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def from_sysctl(values: dict[str, str], available: int) -> HardwareProfile:
    """A Mac from its kernel values; `available` is free memory in bytes."""

    def number(key: str) -> int:
        text = values.get(key, "")
        return int(text) if text.isdecimal() else 0

    machine = "aarch64" if number("hw.optional.arm64") else "x86_64"
    listed = [
        word
        for key in ("machdep.cpu.features", "machdep.cpu.leaf7_features")
        for word in values.get(key, "").split()
    ]
    listed += [
        key.rpartition(".")[2]
        for key, value in values.items()
        if key.startswith("hw.optional.arm.FEAT_") and value == "1"
    ]
    flags = normalise_flags([*listed, *(["neon"] if machine == "aarch64" else [])])
    logical = number("hw.logicalcpu") or 1
    sizes = [number(f"hw.perflevel{level}.logicalcpu") for level in range(4)]
    clusters, first = [], 0
    for size in (size for size in sizes if size):
        clusters.append(tuple(range(first, first + size)))
        first += size
    brand = values.get("machdep.cpu.brand_string", "")
    bf16, fp16 = float_support("none", flags, None)
    sources = dict.fromkeys(FACTS, "sysctl") | {
        "clusters": "sysctl hw.perflevel; ids are positions, macOS does not pin threads",
        "ram_available": "psutil.virtual_memory",
        "numa_nodes": "default: one node",
        "thermal_zones": "default: not readable",
        "accelerator": "default: no kernels for Apple GPUs here",
    }
    gpu = Accelerator(
        "gpu", "apple", brand, False, "no kernels for apple GPUs here; the CPU is used"
    )
    return HardwareProfile(
        arch=machine,
        cpu_model=brand,
        cpu_flags=flags,
        logical_cores=logical,
        physical_cores=number("hw.physicalcpu") or logical,
        clusters=tuple(clusters) or (tuple(range(logical)),),
        l3_cache=number("hw.l3cachesize"),
        ram_total=number("hw.memsize"),
        ram_available=available,
        supports_bf16=bf16,
        supports_fp16=fp16,
        host_os="darwin",
        accelerators=(gpu,) if machine == "aarch64" else (),
        sources=sources,
    )


def from_platform(flags: frozenset[str]) -> HardwareProfile:
    """The running machine from the platform module and psutil alone, with these CPU flags."""
    machine = normalise_arch(platform.machine())
    logical = os.cpu_count() or 1
    ram = psutil.virtual_memory()
    bf16, fp16 = float_support("none", flags, None)
    sources = dict.fromkeys(FACTS, "default: not readable on this system") | {
        "arch": "platform.machine()",
        "cpu_model": "platform.processor()",
        "cpu_flags": "IsProcessorFeaturePresent" if flags else "default: not readable",
        "logical_cores": "os.cpu_count()",
        "physical_cores": "psutil.cpu_count(logical=False)",
        "clusters": "default: one cluster",
        "ram_total": "psutil.virtual_memory",
        "ram_available": "psutil.virtual_memory",
        "host_os": "platform.system()",
        "supports_bf16": "cpu_flags",
        "supports_fp16": "cpu_flags",
    }
    return HardwareProfile(
        arch=machine,
        cpu_model=platform.processor(),
        cpu_flags=flags,
        logical_cores=logical,
        physical_cores=psutil.cpu_count(logical=False) or logical,
        clusters=(tuple(range(logical)),),
        ram_total=ram.total,
        ram_available=ram.available,
        supports_bf16=bf16,
        supports_fp16=fp16,
        host_os={"Windows": "windows"}.get(platform.system(), "linux"),
        sources=sources,
    )


def _windows_flags() -> frozenset[str]:
    """The few flags that Windows tells; empty elsewhere."""
    library = getattr(ctypes, "windll", None)
    if library is None:
        return frozenset()
    asked = library.kernel32.IsProcessorFeaturePresent
    return normalise_flags(name for code, name in _WINDOWS_FEATURES.items() if asked(code))
