"""Device profiles that the path tests share, one of each kind the decision table tells apart."""

from __future__ import annotations

import pytest

from weightpath.device.profile import HardwareProfile, from_dict

AVX512 = ["avx", "avx2", "avx512f", "avx512bw", "avx512vl"]


@pytest.fixture(scope="session")
def profiles() -> dict[str, HardwareProfile]:
    """Name -> profile."""
    x86 = {"arch": "x86_64", "ram_total": 16 << 30}
    cuda = x86 | {"cpu_flags": [*AVX512, "avx512_vnni", "amx_tile", "amx_int8"]}
    described = {
        "amx xeon": x86
        | {"cpu_flags": [*AVX512, "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8"]},
        "amx without int8": x86 | {"cpu_flags": [*AVX512, "avx512_vnni", "amx_tile"]},
        "zen4": x86 | {"cpu_flags": [*AVX512, "avx512_vnni", "avx512_bf16"]},
        "avx_vnni laptop": x86 | {"cpu_flags": ["avx", "avx2", "avx_vnni"]},
        "plain avx512": x86 | {"cpu_flags": AVX512},
        "avx2 laptop": x86 | {"cpu_flags": ["avx", "avx2"]},
        "avx only": x86 | {"cpu_flags": ["avx"]},
        "arm server": {"arch": "aarch64", "cpu_flags": ["neon", "dotprod", "i8mm", "bf16"]},
        "raspberry pi": {"arch": "aarch64", "cpu_flags": ["neon"]},
        "jetson orin": {
            "arch": "aarch64",
            "accelerator": "cuda_unified",
            "gpu_capability": [8, 7],
        },
        "jetson xavier": {
            "arch": "aarch64",
            "accelerator": "cuda_unified",
            "gpu_capability": [7, 2],
        },
        "h100": cuda | {"accelerator": "cuda", "gpu_capability": [9, 0], "gpu_memory": 80 << 30},
        "t4": cuda | {"accelerator": "cuda", "gpu_capability": [7, 5], "gpu_memory": 16 << 30},
        "unknown gpu": cuda | {"accelerator": "cuda", "supports_bf16": True, "supports_fp16": True},
        "maxwell": cuda | {"accelerator": "cuda", "gpu_capability": [5, 0]},
        "phone": {"arch": "aarch64", "accelerator": "npu:qualcomm", "host_os": "android"},
        "riscv": {"arch": "riscv64"},
    }
    return {name: from_dict(data, where=name) for name, data in described.items()}
