"""What a path needs of a device, one predicate a need: None when it is there, else a sentence.

The sentence is shown after the path's name ("w4a8-amx: it needs AMX tiles ...") and names the
missing flag, the capability or the hardware class that was found.
"""

from __future__ import annotations

from weightpath.device.profile import HardwareProfile, hardware_class, has_amx

TURING = (7, 5)
"""Lowest compute capability of vLLM 0.32.0's weight-only scheme and of its Marlin kernel."""


def _x86(profile: HardwareProfile) -> str | None:
    return _only(profile, "x86_cpu")


def _only(profile: HardwareProfile, *classes: str) -> str | None:
    found = hardware_class(profile)
    wanted = " or ".join(classes)
    return None if found in classes else f"it is for {wanted}, and this device is {found}"


def amx(profile: HardwareProfile) -> str | None:
    """x86 with amx_tile and amx_int8."""
    missing = [name for name in ("amx_tile", "amx_int8") if name not in profile.cpu_flags]
    if (reason := _x86(profile)) or has_amx(profile):
        return reason
    return f"it needs AMX tiles with int8 products, and this CPU lacks {' and '.join(missing)}"


def vnni(profile: HardwareProfile) -> str | None:
    """x86 with avx512_vnni or avx_vnni."""
    if (reason := _x86(profile)) or profile.cpu_flags & {"avx512_vnni", "avx_vnni"}:
        return reason
    return "it needs VNNI, and this CPU has neither avx512_vnni nor avx_vnni"


def avx2(profile: HardwareProfile) -> str | None:
    """x86 with avx2."""
    if (reason := _x86(profile)) or "avx2" in profile.cpu_flags:
        return reason
    return "it needs avx2, which this CPU lacks"


def cpu(profile: HardwareProfile) -> str | None:
    """x86-64 or 64-bit Arm, without an accelerator."""
    return _only(profile, "x86_cpu", "arm64_cpu")


def torch_device(profile: HardwareProfile) -> str | None:
    """Anything but a phone's NPU."""
    if hardware_class(profile) == "npu_phone":
        return "it runs in torch, and a phone's NPU (npu_phone) runs an exported graph"
    return None


def turing(profile: HardwareProfile) -> str | None:
    """CUDA with a capability of 7.5 or more."""
    if reason := _only(profile, "cuda_discrete", "jetson"):
        return reason
    if profile.gpu_capability is None:
        return "it needs compute capability 7.5, and this GPU's capability is unknown"
    if profile.gpu_capability < TURING:
        found = ".".join(str(part) for part in profile.gpu_capability)
        return f"it needs compute capability 7.5, and this GPU has {found}"
    return None


def bf16(profile: HardwareProfile) -> str | None:
    """bf16 arithmetic without emulation."""
    if (reason := torch_device(profile)) or profile.supports_bf16:
        return reason
    return "it needs bf16 arithmetic, which this device would emulate"


def fp16(profile: HardwareProfile) -> str | None:
    """fp16 arithmetic without emulation."""
    if (reason := torch_device(profile)) or profile.supports_fp16:
        return reason
    return "it needs fp16 arithmetic, which this device would emulate"


def phone(profile: HardwareProfile) -> str | None:
    """A phone's NPU."""
    return _only(profile, "npu_phone")
