"""HardwareProfile: what a machine is, as facts with their sources."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    """Facts about one machine. Bytes are bytes, frequencies kHz, flags normalised names."""

    arch: str  # "x86_64", "aarch64", ...
    cpu_model: str = ""
    cpu_flags: frozenset[str] = frozenset()  # avx2, avx512f, avx512_vnni, avx_vnni, amx_tile, neon, dotprod, i8mm ...
    logical_cores: int = 1  # usable ones: affinity and cgroup quota honoured
    physical_cores: int = 1
    clusters: tuple[tuple[int, ...], ...] = ()  # cpu ids of equal maximum frequency, fastest first
    numa_nodes: int = 1
    ram_total: int = 0  # bytes, cgroup limit honoured
    ram_available: int = 0  # bytes, cgroup limit honoured
    accelerator: str = "none"  # "none", "cuda", "cuda_unified", "npu:<vendor>"
    gpu_name: str = ""
    gpu_memory: int = 0  # bytes
    gpu_sm_count: int = 0
    gpu_capability: tuple[int, int] | None = None
    supports_bf16: bool = False  # arithmetic that is not emulated, on the device that would run the model
    supports_fp16: bool = False
    thermal_zones: tuple[str, ...] = ()
    host_os: str = "linux"  # linux, wsl2, android, darwin, windows
    accelerators: tuple[Accelerator, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)  # field name -> where it came from
