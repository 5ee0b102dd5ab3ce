"""probe: what this machine is, read from /proc and /sys and, on the live root, the GPU library.

    device argument  >  the file that WEIGHTPATH_DEVICE names  >  the probe

`root` may be any folder that holds proc/ and sys/, so tests and saved machines are read by the
same code. Nothing is cached and nothing is read at import. A fact that cannot be read keeps its
default, and `sources` says so.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path

from weightpath.device import accelerators, cpu, limits
from weightpath.device.files import NOT_READABLE, exists, names, read_text
from weightpath.device.foreign import probe_without_proc
from weightpath.device.profile import (
    FACTS,
    HardwareProfile,
    float_support,
    from_dict,
)
from weightpath.errors import BadRequest

ENVIRONMENT = "WEIGHTPATH_DEVICE"
_PROFILES = resources.files("weightpath.device") / "profiles"


def shipped_profiles() -> tuple[str, ...]:
    """Names of the profiles that come with the package, for devices that are not here."""
    found = (item.name for item in _PROFILES.iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in found if name.endswith(".json")))


def probe(root: Path | str = "/", device: str | Path | None = None) -> HardwareProfile:
    """The profile of the machine under `root`, or of the device that `device` names.

    device: a shipped name or a JSON file; it wins over the environment variable WEIGHTPATH_DEVICE
    (the same, read at the call), which replaces the whole probe. Error: BadRequest on a file that
    is missing, is not JSON or is not a profile, or a root that is no folder.
    """
    chosen = device if device is not None else os.environ.get(ENVIRONMENT)
    if chosen:
        return load_profile(chosen)
    folder = Path(root).resolve()
    if not folder.is_dir():
        raise BadRequest(f"root {root}: no such folder; give one that holds proc/ and sys/")
    live = folder == Path(folder.anchor)
    if live and not sys.platform.startswith(("linux", "android")):
        return probe_without_proc()
    return _probe_linux(folder, live)


def load_profile(device: str | Path) -> HardwareProfile:
    """A shipped profile by its name, or a JSON file; every fact gets a source.

    A text that is a shipped name means that profile; write ./name for a file of the same name.
    """
    shipped = shipped_profiles()
    if isinstance(device, str) and device in shipped:
        where, origin = f"shipped profile {device}", f"shipped profile {device}"
        raw = (_PROFILES / f"{device}.json").read_bytes()
    else:
        where, origin = f"device file {device}", f"JSON file {Path(device).name}"
        try:
            raw = Path(device).read_bytes()
        except FileNotFoundError:
            raise BadRequest(
                f"device '{device}': no such file and no shipped profile; "
                f"give a JSON file or one of {', '.join(shipped)}"
            ) from None
        except OSError as error:
            raise BadRequest(f"{where}: cannot be read ({error.strerror}); check it") from None
    try:
        data = json.loads(raw)
    except json.JSONDecodeError as error:
        raise BadRequest(
            f"{where}: not JSON, line {error.lineno} column {error.colno}: {error.msg}; mend it"
        ) from None
    except ValueError:  # not UTF-8, or a number of thousands of digits
        raise BadRequest(f"{where}: not JSON text; write an object with 'arch'") from None
    except RecursionError:
        raise BadRequest(f"{where}: nested too deeply; write an object with 'arch'") from None
    profile = from_dict(data, where)
    sources = {fact: origin if fact in data else f"default: not in {origin}" for fact in FACTS}
    return replace(profile, sources=sources | profile.sources)


def _probe_linux(root: Path, live: bool) -> HardwareProfile:
    blocks = cpu.read_cpuinfo(root)
    sources: dict[str, str] = {}
    arch, sources["arch"] = cpu.arch(root, blocks, live)
    model, sources["cpu_model"] = cpu.model(root, blocks)
    flags, sources["cpu_flags"] = cpu.flags(arch, blocks)
    ids, ids_source = _usable_cpus(root, blocks, live)
    physical, sources["physical_cores"] = cpu.physical_cores(root, blocks, ids)
    clusters, sources["clusters"] = cpu.clusters(root, ids)
    nodes, sources["numa_nodes"] = cpu.numa_nodes(root, ids)
    l3_cache, sources["l3_cache"] = cpu.l3_cache(root, ids)
    logical, sources["logical_cores"] = len(ids), ids_source
    quota, quota_source = limits.cpu_quota(root)
    if quota is not None and int(quota) < logical:
        logical = max(1, int(quota))  # rounded down: one thread too many is throttled
        sources["logical_cores"] += f", cut to {logical} by {quota_source} ({quota:g} cpus)"
    if physical > logical:
        sources["physical_cores"] += f" ({physical}), cut to logical_cores"
    memory = limits.memory(root)
    sources["ram_total"], sources["ram_available"] = memory.total_source, memory.available_source
    host, sources["host_os"] = _host_os(root)
    zones, sources["thermal_zones"] = _thermal_zones(root)
    found = accelerators.find(root, live, host == "android", memory.total)
    for fact in ("accelerator", "gpu_name", "gpu_memory", "gpu_sm_count", "gpu_capability"):
        sources[fact] = found.sources.get(fact, found.source)
    sources["accelerators"] = "PCI bus, device tree, SoC number"
    if found.accelerator.startswith("cuda"):
        sources["accelerators"] += f"; {found.source}"
    bf16, fp16 = float_support(found.accelerator, flags, found.gpu_capability)
    on_cpu = found.accelerator == "none"
    basis = "cpu_flags" if on_cpu else "gpu_capability" if found.gpu_capability else "accelerator"
    sources["supports_bf16"] = sources["supports_fp16"] = f"from {basis}"
    return HardwareProfile(
        arch=arch,
        cpu_model=model,
        cpu_flags=flags,
        logical_cores=logical,
        physical_cores=min(physical, logical),
        clusters=clusters,
        numa_nodes=nodes,
        l3_cache=l3_cache,
        ram_total=memory.total,
        ram_available=memory.available,
        accelerator=found.accelerator,
        gpu_name=found.gpu_name,
        gpu_memory=found.gpu_memory,
        gpu_sm_count=found.gpu_sm_count,
        gpu_capability=found.gpu_capability,
        supports_bf16=bf16,
        supports_fp16=fp16 or found.fp16,
        thermal_zones=zones,
        host_os=host,
        accelerators=found.seen,
        sources=sources,
    )


def _usable_cpus(root: Path, blocks: cpu.Blocks, live: bool) -> tuple[tuple[int, ...], str]:
    """Online cpus that the cpuset and, on the live root, the process's affinity allow."""
    ids, source = cpu.online(root, blocks)
    if live and source == NOT_READABLE:
        return tuple(sorted(os.sched_getaffinity(0))), "sched_getaffinity"
    allowed, label = limits.cpuset(root)
    masks = [(allowed, label)] if allowed is not None else []
    if live:
        masks.append((frozenset(os.sched_getaffinity(0)), "sched_getaffinity"))
    for mask, name in masks:
        kept = tuple(cpu_id for cpu_id in ids if cpu_id in mask)
        if kept and kept != ids:
            ids, source = kept, f"{source}, cut to {len(kept)} by {name}"
    return ids, source


def _host_os(root: Path) -> tuple[str, str]:
    if exists(root, "system/build.prop") or exists(root, "system/bin/app_process64"):
        return "android", "/system"
    version = read_text(root, "proc/version")
    if "microsoft" in version.lower():
        return "wsl2", "/proc/version names Microsoft"
    return "linux", "/proc/version" if version else "default: /proc/version not readable"


def _thermal_zones(root: Path) -> tuple[tuple[str, ...], str]:
    """Types of the thermal zones, in the order of their numbers."""
    folder = "sys/class/thermal"
    zones = [name for name in names(root, folder) if name.startswith("thermal_zone")]
    zones.sort(key=lambda name: (len(name), name))
    types = tuple(read_text(root, f"{folder}/{name}/type") or name for name in zones)
    return types, f"/{folder}" if zones else "default: no thermal zone readable"
