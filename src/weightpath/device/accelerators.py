"""Accelerators of a machine: what the buses show, and what the GPU library can use.

The buses (PCI class codes, the device tree of a Jetson, the SoC number of a phone) say what is
there under any root. Whether a CUDA device works, and how large it is, only the GPU library can
say, and it is asked on the live root only. What cannot be used is listed with the reason.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from weightpath.device.files import device_tree, exists, names, read_number, read_text
from weightpath.device.profile import Accelerator

# PCI vendor ids (pci.ids): the makers of accelerators. Display chips of others are no help here.
_VENDORS = {
    0x10DE: "nvidia", 0x1002: "amd", 0x1022: "amd", 0x8086: "intel", 0x1414: "microsoft",
    0x17CB: "qualcomm", 0x1DA3: "habana", 0x1D0F: "amazon", 0x1AE0: "google", 0x19E5: "huawei",
    0x1E52: "tenstorrent", 0x1E60: "hailo",
}  # fmt: skip
_DISPLAY, _ACCELERATION = 0x03, 0x12  # PCI base classes
_AMD_NPUS = {0x1502, 0x17F0}  # Ryzen AI, which shows as a signal processor (class 0x1180)

# Compatible string nvidia,<soc> -> GPU and compute capability (NVIDIA's CUDA GPU list).
_TEGRA = {
    "tegra210": ("Tegra X1", (5, 3)), "tegra186": ("Tegra X2", (6, 2)),
    "tegra194": ("Xavier", (7, 2)), "tegra234": ("Orin", (8, 7)), "tegra264": ("Thor", (11, 0)),
}  # fmt: skip

# SoC number (the kernel's dt-bindings/arm/qcom,ids.h) -> model and Hexagon version (the SoC table
# of Qualcomm's LiteRT delegate).
_QUALCOMM = {457: ("SM8450", 69), 519: ("SM8550", 73), 557: ("SM8650", 75), 618: ("SM8750", 79)}

NOT_ASKED = "the GPU library is asked on the live root only"
_CPU_ONLY = "torch {} is built without CUDA; install a CUDA build of torch"


@dataclass(frozen=True)
class CudaDevice:
    """One device as the GPU library reports it; memory in bytes."""

    name: str
    memory: int
    sm_count: int
    capability: tuple[int, int]
    integrated: bool


@dataclass(frozen=True)
class Found:
    """The accelerator that a model would use, and every one that was seen."""

    accelerator: str = "none"
    gpu_name: str = ""
    gpu_memory: int = 0
    gpu_sm_count: int = 0
    gpu_capability: tuple[int, int] | None = None
    seen: tuple[Accelerator, ...] = ()
    fp16: bool = False  # for an NPU, which float_support cannot tell
    source: str = "no accelerator found"
    sources: dict[str, str] = field(default_factory=dict)  # of single facts that differ from it


def find(root: Path, live: bool, android: bool, ram_total: int) -> Found:
    """Look at the buses, ask the GPU library where that may be done, and choose.

    A phone's NPU comes first, then CUDA. `ram_total` (bytes) is the GPU's memory where the GPU
    shares it and the library was not asked.
    """
    listed = pci_devices(root)
    npu = _qualcomm_npu(root) if android else None
    if npu is not None:
        return replace(npu, seen=(*npu.seen, *listed))
    tegra = _tegra(root, ram_total)
    if not live:
        return replace(tegra, seen=(*tegra.seen, *listed)) if tegra else Found(seen=listed)
    nvidia = tegra is not None or any(item.vendor == "nvidia" for item in listed)
    nodes = ("dev/nvidiactl", "dev/nvidia0", "dev/dxg", "proc/driver/nvidia/version")
    if not nvidia and "torch" not in sys.modules and not any(exists(root, n) for n in nodes):
        return Found(seen=listed)
    devices, problem = cuda_devices()
    cards = [item for item in listed if item.vendor == "nvidia"]
    others = tuple(item for item in listed if item.vendor != "nvidia")
    if not devices:
        chips = (*(tegra.seen if tegra else ()), *cards)
        refused = tuple(replace(item, usable=False, reason=problem) for item in chips)
        return Found(seen=(*refused, *others), source=f"no usable accelerator: {problem}")
    usable = tuple(Accelerator("cuda", "nvidia", device.name, True) for device in devices)
    hidden = "the GPU library does not show it (CUDA_VISIBLE_DEVICES?)"
    rest = tuple(replace(item, reason=hidden) for item in cards[len(devices) :])
    first = devices[0]
    return Found(
        accelerator="cuda_unified" if first.integrated else "cuda",
        gpu_name=first.name,
        gpu_memory=first.memory,
        gpu_sm_count=first.sm_count,
        gpu_capability=first.capability,
        seen=(*usable, *rest, *others),
        source="torch.cuda device 0",
    )


def cuda_devices() -> tuple[list[CudaDevice], str]:
    """Devices that the GPU library can use, and where there are none the reason.

    Imports torch here and nowhere else in this room, since it takes seconds.
    """
    try:
        import torch
    except (ImportError, OSError) as error:
        return [], f"torch cannot be imported ({type(error).__name__}: {error})".splitlines()[0]
    if torch.version.cuda is None:
        return [], _CPU_ONLY.format(torch.__version__)
    try:
        if not torch.cuda.is_available():
            return [], "the GPU library finds no device; check nvidia-smi and CUDA_VISIBLE_DEVICES"
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as error:
        return [], f"the GPU library failed: {error}".splitlines()[0]
    return [
        CudaDevice(
            name=item.name,
            memory=item.total_memory,
            sm_count=item.multi_processor_count,
            capability=(item.major, item.minor),
            integrated=bool(item.is_integrated),
        )
        for item in found
    ], ""


def pci_devices(root: Path) -> tuple[Accelerator, ...]:
    """Accelerators on the PCI bus: GPUs of known makers and any processing accelerator."""
    found = []
    for slot in names(root, "sys/bus/pci/devices"):
        folder = f"sys/bus/pci/devices/{slot}"
        code = read_number(root, f"{folder}/class")
        vendor_id = read_number(root, f"{folder}/vendor")
        device_id = read_number(root, f"{folder}/device")
        if code is None or vendor_id is None or device_id is None:
            continue
        base = code >> 16
        vendor = _VENDORS.get(vendor_id, f"pci:{vendor_id:04x}")
        gpu = base == _DISPLAY and vendor_id in _VENDORS
        if not (gpu or base == _ACCELERATION or (vendor == "amd" and device_id in _AMD_NPUS)):
            continue
        kind = "cuda" if vendor == "nvidia" else "gpu" if gpu else "npu"
        name = _pci_name(root, slot, vendor_id, device_id)
        reason = NOT_ASKED if kind == "cuda" else _why_not(kind, vendor)
        found.append(Accelerator(kind, vendor, name, False, reason))
    return tuple(found)


def _why_not(kind: str, vendor: str) -> str:
    if vendor == "microsoft":
        return "a virtual GPU; the card behind it shows only through its own library"
    what = "GPUs" if kind == "gpu" else "accelerators"
    return f"no kernels for {vendor} {what} here; the CPU is used"


def _pci_name(root: Path, slot: str, vendor_id: int, device_id: int) -> str:
    """The driver's name, else the one in the system's pci.ids, else the two ids."""
    for line in read_text(root, f"proc/driver/nvidia/gpus/{slot}/information").splitlines():
        if line.startswith("Model:"):
            return line.partition(":")[2].strip()
    for database in ("usr/share/misc/pci.ids", "usr/share/hwdata/pci.ids"):
        inside = False
        for line in read_text(root, database).splitlines():
            if line[:1] not in ("\t", "#", ""):
                inside = line.startswith(f"{vendor_id:04x}")
            elif inside and line.startswith(f"\t{device_id:04x}"):
                return line[5:].strip()
    return f"PCI {vendor_id:04x}:{device_id:04x}"


def _tegra(root: Path, ram_total: int) -> Found | None:
    """A Jetson's GPU as the device tree tells it: the SoC, so not how many multiprocessors."""
    compatible = device_tree(root, "compatible")
    chips = [name.removeprefix("nvidia,") for name in compatible if name.startswith("nvidia,tegra")]
    for chip in chips:
        if chip in _TEGRA:
            name, capability = _TEGRA[chip]
            source = f"device tree compatible nvidia,{chip}; {NOT_ASKED}"
            return Found(
                accelerator="cuda_unified",
                gpu_name=name,
                gpu_memory=ram_total,
                gpu_capability=capability,
                seen=(Accelerator("cuda", "nvidia", name, True),),
                source=source,
                sources={
                    "gpu_memory": "ram_total: the GPU shares the machine's memory",
                    "gpu_sm_count": f"default: not in the device tree; {NOT_ASKED}",
                },
            )
    return None


def _qualcomm_npu(root: Path) -> Found | None:
    """The Hexagon tensor processor of a phone, from the SoC's number."""
    number = read_number(root, "sys/devices/soc0/soc_id")
    if number not in _QUALCOMM:
        return None
    model, version = _QUALCOMM[number]
    return Found(
        accelerator="npu:qualcomm",
        seen=(Accelerator("npu", "qualcomm", f"Hexagon HTP v{version} ({model})", True),),
        fp16=True,  # float16 since v69, bfloat16 from v81 on (LLVM's Hexagon target)
        source=f"/sys/devices/soc0/soc_id {number}",
    )
