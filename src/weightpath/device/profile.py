"""HardwareProfile: what a machine is, as facts with their sources, and the class it falls in.

    device_class = hardware_class / isa_tier        e.g. x86_cpu/avx512_vnni, cuda_discrete/sm_90

Evidence records match on the device class, so both halves are derived from the facts alone.
A profile travels as JSON (`to_dict`, `from_dict`); reading one is strict, since a misspelt key
would silently plan for another machine.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from weightpath.device.checks import Wrong, clusters, flag, items, pair, shown, text, texts, whole
from weightpath.errors import BadRequest


@dataclass(frozen=True)
class Accelerator:
    """One accelerator that was seen: usable or not, and the reason where not."""

    kind: str  # "cuda", "npu", "gpu" (a GPU that is not CUDA)
    vendor: str  # "nvidia", "qualcomm", "amd", "intel", "mediatek", ...
    name: str
    usable: bool
    reason: str = ""  # why not usable; empty when it is


@dataclass(frozen=True)
class HardwareProfile:
    """Facts about one machine. Bytes are bytes, flags are normalised names.

    0 bytes, 0 multiprocessors and an empty text mean that the fact is not known; `sources` says
    why. `clusters` holds every cpu that affinity allows, so a CPU quota may leave `logical_cores`
    smaller than the number of ids.
    """

    arch: str  # "x86_64", "aarch64", ...
    cpu_model: str = ""
    cpu_flags: frozenset[str] = frozenset()  # avx2, avx512_vnni, amx_tile, neon, dotprod, i8mm ...
    logical_cores: int = 1  # usable ones: affinity and cgroup quota honoured
    physical_cores: int = 1
    clusters: tuple[tuple[int, ...], ...] = ()  # cpu ids of equal maximum frequency, fastest first
    numa_nodes: int = 1
    l3_cache: int = 0  # bytes, summed over the L3 caches of the usable cores
    ram_total: int = 0  # bytes, cgroup limit honoured
    ram_available: int = 0  # bytes, cgroup limit honoured
    accelerator: str = "none"  # "none", "cuda", "cuda_unified", "npu:<vendor>"
    gpu_name: str = ""
    gpu_memory: int = 0  # bytes; the whole memory where it is unified
    gpu_sm_count: int = 0
    gpu_capability: tuple[int, int] | None = None
    supports_bf16: bool = False  # not emulated, on the device that would run the model
    supports_fp16: bool = False
    thermal_zones: tuple[str, ...] = ()
    host_os: str = "linux"  # linux, wsl2, android, darwin, windows
    accelerators: tuple[Accelerator, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)  # field name -> where it came from


FIELDS = tuple(item.name for item in fields(HardwareProfile))
FACTS = tuple(name for name in FIELDS if name != "sources")
"""Every field that must have a source."""
HOSTS = ("linux", "wsl2", "android", "darwin", "windows")

_ARCHITECTURES = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}

# One name per feature. Left: spellings of the Arm kernel (asimd...), sysctl of macOS (FEAT_...,
# AVX1.0), compilers and older kernels. Right: the x86 kernel's spelling, or Arm's extension name.
_ALIASES = {
    "asimd": "neon", "advsimd": "neon", "asimddp": "dotprod", "asimdhp": "fp16",
    "asimdfhm": "fp16fml", "feat_dotprod": "dotprod", "feat_i8mm": "i8mm", "feat_bf16": "bf16",
    "feat_fp16": "fp16", "feat_fhm": "fp16fml", "feat_sme": "sme", "feat_sme2": "sme2",
    "sve_bf16": "svebf16", "sve_i8mm": "svei8mm", "pni": "sse3", "avx1_0": "avx",
    "avxvnni": "avx_vnni", "avxvnniint8": "avx_vnni_int8", "avx512vnni": "avx512_vnni",
    "avx512bf16": "avx512_bf16", "avx512fp16": "avx512_fp16", "avx512_f": "avx512f",
    "avx512_bw": "avx512bw", "avx512_vl": "avx512vl", "avx512_dq": "avx512dq",
    "amxtile": "amx_tile", "amxint8": "amx_int8", "amxbf16": "amx_bf16", "amxfp16": "amx_fp16",
}  # fmt: skip


def normalise_flags(flags: Iterable[str]) -> frozenset[str]:
    """CPU flags under one name each: lower case, `_` for `-` and `.`, aliases resolved.

    asimd -> neon, asimddp -> dotprod, asimdhp -> fp16, avx512-vnni -> avx512_vnni; a name that is
    no alias stays (avx512f stays avx512f).
    """
    plain = (flag.strip().lower().replace("-", "_").replace(".", "_") for flag in flags)
    return frozenset(_ALIASES.get(flag, flag) for flag in plain if flag)


def normalise_arch(machine: str) -> str:
    """The kernel's name of an architecture: AMD64 -> x86_64, arm64 -> aarch64."""
    return _ARCHITECTURES.get(machine.lower(), machine.lower())


_AMX = ("amx_tile", "amx_int8")


def has_amx(profile: HardwareProfile) -> bool:
    """Whether int8 tile products run: the tiles alone are not enough, amx_int8 must be there."""
    return profile.cpu_flags.issuperset(_AMX)


def hardware_class(profile: HardwareProfile) -> str:
    """npu_phone, jetson (CUDA on unified memory), cuda_discrete, arm64_cpu or x86_cpu.

    Decided in that order; any other processor (riscv64, 32-bit Arm) is `other_cpu`, where only
    plain torch kernels are known to run.
    """
    if profile.accelerator.startswith("npu:"):
        return "npu_phone"
    if profile.accelerator == "cuda_unified":
        return "jetson"
    if profile.accelerator == "cuda":
        return "cuda_discrete"
    return {"aarch64": "arm64_cpu", "x86_64": "x86_cpu"}.get(profile.arch, "other_cpu")


# Fastest int8 product first; every flag of a tier must be there.
_X86_TIERS = (
    ("amx", _AMX),
    ("avx512_vnni", ("avx512f", "avx512_vnni")),
    ("avx_vnni", ("avx_vnni",)),
    ("avx512", ("avx512f",)),
    ("avx2", ("avx2",)),
)
_ARM_TIERS = (("i8mm", ("i8mm",)), ("dotprod", ("dotprod",)))


def isa_tier(profile: HardwareProfile) -> str:
    """The instruction set that decides which kernel is fast.

    x86: amx, avx512_vnni, avx_vnni, avx512, avx2 or sse. Arm: i8mm, dotprod or neon. CUDA: sm_90
    from capability 9.0 (sm_unknown without one). NPU: htp for Qualcomm, else the vendor's name.
    Another processor: its architecture.
    """
    group = hardware_class(profile)
    if group == "npu_phone":
        vendor = profile.accelerator.removeprefix("npu:")
        return {"qualcomm": "htp"}.get(vendor, vendor)
    if group in ("jetson", "cuda_discrete"):
        capability = profile.gpu_capability
        return f"sm_{capability[0]}{capability[1]}" if capability else "sm_unknown"
    if group == "other_cpu":
        return profile.arch
    tiers, floor = (_X86_TIERS, "sse") if group == "x86_cpu" else (_ARM_TIERS, "neon")
    return next((name for name, needed in tiers if profile.cpu_flags.issuperset(needed)), floor)


def device_class(profile: HardwareProfile) -> str:
    """The key that evidence records match on: hardware_class/isa_tier."""
    return f"{hardware_class(profile)}/{isa_tier(profile)}"


def float_support(
    accelerator: str, flags: frozenset[str], capability: tuple[int, int] | None
) -> tuple[bool, bool]:
    """Whether bf16 and fp16 arithmetic run without emulation where the model would run.

    CUDA: bf16 from capability 8.0, fp16 from 5.3 (CUDA C++ programming guide, arithmetic
    throughput table). CPU: bf16 with avx512_bf16, amx_bf16 or Arm bf16; fp16 with avx512_fp16,
    amx_fp16 or Arm fp16. An NPU's cannot be told from these facts: (False, False).
    """
    if accelerator.startswith("npu:"):
        return False, False
    if accelerator != "none":
        return bool(capability and capability >= (8, 0)), bool(capability and capability >= (5, 3))
    bf16 = not flags.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})
    return bf16, not flags.isdisjoint({"avx512_fp16", "amx_fp16", "fp16"})


def to_dict(profile: HardwareProfile) -> dict[str, Any]:
    """The profile as JSON-ready values: flags a sorted list, tuples lists, capability [9, 0]."""
    plain = asdict(profile)
    capability = profile.gpu_capability
    return plain | {
        "cpu_flags": sorted(profile.cpu_flags),
        "clusters": [list(cluster) for cluster in profile.clusters],
        "gpu_capability": None if capability is None else list(capability),
        "thermal_zones": list(profile.thermal_zones),
        "accelerators": list(plain["accelerators"]),
    }


def _arch(value: object) -> str:
    name = text(value).strip()
    if not name:
        raise Wrong
    return normalise_arch(name)


def _accelerator_name(value: object) -> str:
    name = text(value)
    if name not in ("none", "cuda", "cuda_unified") and not (name[:4] == "npu:" and name[4:]):
        raise Wrong
    return name


def _host(value: object) -> str:
    if value not in HOSTS:
        raise Wrong
    return text(value)


def _accelerators(value: object) -> tuple[Accelerator, ...]:
    found = []
    for item in items(value):
        required, allowed = {"kind", "vendor", "name", "usable"}, {"reason"}
        if not isinstance(item, dict) or not required <= item.keys() <= required | allowed:
            raise Wrong
        words = {key: text(part) for key, part in item.items() if key != "usable"}
        found.append(Accelerator(usable=flag(item["usable"]), **words))
    return tuple(found)


def _sources(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not set(value) <= set(FACTS):
        raise Wrong
    return {key: text(source) for key, source in value.items()}


_BYTES = "a whole number of bytes, 0 or more"
_MOST = 65_536  # cores or nodes; more than the kernel's largest NR_CPUS
_COUNT = f"a whole number from 1 to {_MOST}"
_ACCEPTED: dict[str, tuple[str, Callable[[object], Any]]] = {
    "arch": ("a name such as 'x86_64' or 'aarch64'", _arch),
    "cpu_model": ("a text", text),
    "cpu_flags": ("a list of names", lambda value: normalise_flags(texts(value))),
    "logical_cores": (_COUNT, lambda value: whole(value, 1, _MOST)),
    "physical_cores": (_COUNT, lambda value: whole(value, 1, _MOST)),
    "clusters": ("a list of lists of cpu ids, each id once, fastest first", clusters),
    "numa_nodes": (_COUNT, lambda value: whole(value, 1, _MOST)),
    "l3_cache": (_BYTES, whole),
    "ram_total": (_BYTES, whole),
    "ram_available": (_BYTES, whole),
    "accelerator": ("'none', 'cuda', 'cuda_unified' or 'npu:<vendor>'", _accelerator_name),
    "gpu_name": ("a text", text),
    "gpu_memory": (_BYTES, whole),
    "gpu_sm_count": ("a whole number, 0 or more", whole),
    "gpu_capability": (
        "a pair such as [9, 0], or null",
        lambda value: None if value is None else pair(value),
    ),
    "supports_bf16": ("true or false", flag),
    "supports_fp16": ("true or false", flag),
    "thermal_zones": ("a list of names", texts),
    "host_os": (f"one of {', '.join(HOSTS)}", _host),
    "accelerators": (
        "a list of objects with kind, vendor, name, usable and, where not usable, reason",
        _accelerators,
    ),
    "sources": ("an object from field names to texts", _sources),
}


def from_dict(data: object, where: str = "device profile") -> HardwareProfile:
    """A profile from JSON values; `where` names the file in messages.

    Only `arch` is required. Left out, `physical_cores` is `logical_cores`, `clusters` one cluster
    of them all, `ram_available` is `ram_total`, and the float support follows from the flags or
    the capability. Error: BadRequest on an unknown key, a wrong type or a missing `arch`, naming
    the key and what is accepted.
    """
    if not isinstance(data, dict):
        raise BadRequest(f"{where}: {shown(data)} is not a profile; write an object with 'arch'")
    for key in data:
        if key not in _ACCEPTED:
            near = difflib.get_close_matches(str(key), FIELDS, n=1)
            meant = f"did you mean '{near[0]}'? " if near else ""
            raise BadRequest(
                f"{where}: unknown key {shown(key)}; {meant}accepted keys: {', '.join(FIELDS)}"
            )
    if "arch" not in data:
        raise BadRequest(f"{where}: 'arch' is missing; give {_ACCEPTED['arch'][0]}")
    values: dict[str, Any] = {}
    for key, value in data.items():
        accepted, convert = _ACCEPTED[key]
        try:
            values[key] = convert(value)
        except Wrong:
            raise BadRequest(f"{where}: '{key}' is {shown(value)}; give {accepted}") from None
    cores = values.get("logical_cores", 1)
    values.setdefault("physical_cores", cores)
    values.setdefault("clusters", (tuple(range(cores)),))
    values.setdefault("ram_available", values.get("ram_total", 0))
    bf16, fp16 = float_support(
        values.get("accelerator", "none"),
        values.get("cpu_flags", frozenset()),
        values.get("gpu_capability"),
    )
    values.setdefault("supports_bf16", bf16)
    values.setdefault("supports_fp16", fp16)
    return HardwareProfile(**values)
