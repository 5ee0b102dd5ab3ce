"""Machines as the files that the probe reads: each function gives {path: text} of one root.

Values were read from such machines (the Arm feature lists, the Xeon, the Zen 4), or are made up
to the kernel's formats (the laptop, the containers).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

Files = dict[str, str]
CPU = "sys/devices/system/cpu"
GIB = 1 << 30

ZEN4 = (
    "fpu sse sse2 ht lm pni ssse3 fma sse4_1 sse4_2 avx f16c avx2 avx512f avx512dq avx512bw "
    "avx512vl avx512_bf16 avx512_vnni"
)
XEON = f"{ZEN4} avx_vnni avx512_fp16 amx_bf16 amx_tile amx_int8"
AVX2 = "fpu sse sse2 ht lm pni ssse3 fma sse4_1 sse4_2 avx f16c avx2"
A76 = (
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop "
    "asimddp"
)
V1 = f"{A76} sve svei8mm svebf16 i8mm bf16"


def build(root: Path, files: Files) -> Path:
    """Write the files under `root` and give it back."""
    for path, text in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return root


def cpuinfo_x86(model: str, flags: str, cores: Iterable[int]) -> Files:
    """/proc/cpuinfo of an x86 machine; `cores` is the core id of every cpu in turn."""
    blocks = [
        f"processor\t: {cpu}\nmodel name\t: {model}\nphysical id\t: 0\ncore id\t\t: {core}\n"
        f"flags\t\t: {flags}\nbogomips\t: 5192.26\n"
        for cpu, core in enumerate(cores)
    ]
    return {"proc/cpuinfo": "\n".join(blocks)}


def cpuinfo_arm(features: str, parts: Iterable[tuple[int, int]], tail: str = "") -> Files:
    """/proc/cpuinfo of an Arm machine; `parts` is (implementer, part) of every cpu in turn."""
    blocks = [
        f"processor\t: {cpu}\nBogoMIPS\t: 108.00\nFeatures\t: {features}\n"
        f"CPU implementer\t: {implementer:#04x}\nCPU architecture: 8\nCPU variant\t: 0x4\n"
        f"CPU part\t: {part:#05x}\nCPU revision\t: 1\n"
        for cpu, (implementer, part) in enumerate(parts)
    ]
    return {"proc/cpuinfo": "\n".join(blocks) + tail}


def per_cpu(name: str, values: Iterable[object]) -> Files:
    """The file `name` of every cpu's folder."""
    return {f"{CPU}/cpu{cpu}/{name}": f"{value}\n" for cpu, value in enumerate(values)}


def meminfo(total_kib: int, available_kib: int) -> Files:
    return {
        "proc/meminfo": f"MemTotal:       {total_kib} kB\nMemFree:        {available_kib // 2} kB\n"
        f"MemAvailable:   {available_kib} kB\nBuffers:  37664 kB\nHugePages_Total:  0\n"
    }


def pci(slot: str, vendor: int, device: int, code: int) -> Files:
    folder = f"sys/bus/pci/devices/{slot}"
    return {
        f"{folder}/vendor": f"{vendor:#06x}\n",
        f"{folder}/device": f"{device:#06x}\n",
        f"{folder}/class": f"{code:#08x}\n",
    }


def zen4_vm() -> Files:
    return {
        **cpuinfo_x86("AMD EPYC", ZEN4, range(2)),
        f"{CPU}/online": "0-1\n",
        **per_cpu("topology/core_cpus_list", range(2)),
        **per_cpu("cpu_capacity", [1024, 1024]),
        **per_cpu("cache/index2/level", [2, 2]),
        **per_cpu("cache/index2/size", ["1024K", "1024K"]),
        **per_cpu("cache/index3/level", [3, 3]),
        **per_cpu("cache/index3/size", ["32768K", "32768K"]),
        **per_cpu("cache/index3/shared_cpu_list", ["0-1", "0-1"]),
        "sys/devices/system/node/node0/cpulist": "0-1\n",
        **meminfo(24_684_084, 24_301_252),
        "proc/version": "Linux version 6.18.44 (builder) (gcc 15.3.0) #1 SMP\n",
        "proc/self/cgroup": "4:memory:/job\n1:cpu:/\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        **pci("0000:00:01.0", 0x1AF4, 0x1045, 0xFFFF00),
    }


def xeon_h200() -> Files:
    return {
        **cpuinfo_x86("Intel(R) Xeon(R) Processor", XEON, range(16)),
        f"{CPU}/online": "0-15\n",
        **per_cpu("topology/core_cpus_list", range(16)),
        **per_cpu("cache/index3/level", [3] * 16),
        **per_cpu("cache/index3/size", ["307200K"] * 16),
        **per_cpu("cache/index3/shared_cpu_list", ["0-15"] * 16),
        "sys/devices/system/node/node0/cpulist": "0-15\n",
        **meminfo(131_981_020, 131_478_764),
        "proc/version": "Linux version 6.18.44 (builder) #1 SMP\n",
        "proc/self/cgroup": "0::/\n",
        **pci("0000:00:00.0", 0x8086, 0x0D57, 0x060000),
        **pci("0000:00:06.0", 0x10DE, 0x2335, 0x030200),
        "proc/driver/nvidia/gpus/0000:00:06.0/information": "Model: \t\t NVIDIA H200\nIRQ: 41\n",
    }


def laptop() -> Files:
    """4 big cores of 2 threads (cpus 0-7, 4.7 GHz) and 4 little ones (8-11, 3.5 GHz)."""
    cores = [0, 0, 4, 4, 8, 8, 12, 12, 16, 17, 18, 19]
    return {
        **cpuinfo_x86("Intel(R) Core(TM) i7 mobile", AVX2, cores),
        f"{CPU}/online": "0-11\n",
        **per_cpu("topology/core_id", cores),
        **per_cpu("topology/physical_package_id", [0] * 12),
        **per_cpu("cpufreq/cpuinfo_max_freq", [4_700_000] * 8 + [3_500_000] * 4),
        **per_cpu("cache/index3/level", [3] * 12),
        **per_cpu("cache/index3/size", ["12M"] * 12),
        **per_cpu("cache/index3/shared_cpu_list", ["0-11"] * 12),
        "sys/devices/system/node/node0/cpulist": "0-11\n",
        **meminfo(16_000_000, 9_000_000),
        "proc/version": "Linux version 6.8.0-45-generic\n",
        "proc/self/cgroup": "0::/user.slice/user-1000.slice/session-2.scope\n",
        "sys/fs/cgroup/user.slice/memory.max": "max\n",
        "sys/fs/cgroup/user.slice/cpu.max": "max 100000\n",
        **{
            f"sys/class/thermal/thermal_zone{zone}/type": f"{name}\n"
            for zone, name in ((0, "acpitz"), (2, "iwlwifi_1"), (10, "x86_pkg_temp"))
        },
        **pci("0000:00:02.0", 0x8086, 0x46A6, 0x030000),
        **pci("0000:00:0b.0", 0x8086, 0x7D1D, 0x120000),
        **pci("0000:00:1f.3", 0x8086, 0x51C8, 0x040100),
        "usr/share/misc/pci.ids": "1002  AMD\n\t46a6  Wrong vendor\n8086  Intel\n"
        "\t46a6  Alder Lake-P GT2\n\t\t1028 0b00  A board\n\t7d1d  Meteor NPU\n",
    }


def arm_server() -> Files:
    """64 Neoverse-V1 cores on two nodes, without cpufreq, and one node of memory alone."""
    return {
        **cpuinfo_arm(V1, [(0x41, 0xD40)] * 64),
        f"{CPU}/online": "0-63\n",
        **per_cpu("topology/thread_siblings_list", range(64)),
        "sys/devices/system/node/node0/cpulist": "0-31\n",
        "sys/devices/system/node/node1/cpulist": "32-63\n",
        "sys/devices/system/node/node2/cpulist": "\n",
        **meminfo(128_000_000, 120_000_000),
        "proc/version": "Linux version 6.8.0-aws\n",
    }


def raspberry_pi() -> Files:
    tail = "\nHardware\t: BCM2835\nRevision\t: d04170\nModel\t\t: Raspberry Pi 5 Model B Rev 1.0\n"
    return {
        **cpuinfo_arm(A76, [(0x41, 0xD0B)] * 4, tail),
        f"{CPU}/online": "0-3\n",
        **per_cpu("topology/core_cpus_list", range(4)),
        **per_cpu("cpufreq/cpuinfo_max_freq", [2_400_000] * 4),
        "proc/device-tree/model": "Raspberry Pi 5 Model B Rev 1.0\0",
        "proc/device-tree/compatible": "raspberrypi,5-model-b\0brcm,bcm2712\0",
        "sys/class/thermal/thermal_zone0/type": "cpu-thermal\n",
        **meminfo(8_245_000, 7_500_000),
        "proc/version": "Linux version 6.6.31+rpt-rpi-2712\n",
    }


def jetson() -> Files:
    return {
        **cpuinfo_arm(A76, [(0x41, 0xD42)] * 12),
        f"{CPU}/online": "0-11\n",
        **per_cpu("topology/core_cpus_list", range(12)),
        **per_cpu("cpufreq/cpuinfo_max_freq", [2_201_600] * 12),
        "sys/firmware/devicetree/base/model": "NVIDIA Jetson AGX Orin Developer Kit\0",
        "sys/firmware/devicetree/base/compatible": "nvidia,p3701-0005\0nvidia,tegra234\0",
        **meminfo(64_349_000, 60_000_000),
        "proc/version": "Linux version 5.15.148-tegra\n",
    }


def wsl2() -> Files:
    return {
        **cpuinfo_x86("12th Gen Intel(R) Core(TM) i7-1260P", f"{AVX2} avx_vnni", [0, 0, 1, 1]),
        f"{CPU}/online": "0-3\n",
        **per_cpu("topology/thread_siblings_list", ["0-1", "0-1", "2-3", "2-3"]),
        **meminfo(8_000_000, 7_000_000),
        "proc/version": "Linux version 5.15.167.4-microsoft-standard-WSL2 (root@x) #1 SMP\n",
        **pci("b8ce:00:00.0", 0x1414, 0x008E, 0x030200),
    }


def _host() -> Files:
    """16 cpus and 64 GiB, to be limited."""
    return {
        **cpuinfo_x86("AMD EPYC 9B14", ZEN4, range(16)),
        f"{CPU}/online": "0-15\n",
        **per_cpu("topology/core_cpus_list", range(16)),
        **meminfo(64 << 20, 60 << 20),
        "proc/version": "Linux version 6.1.0\n",
    }


def container_v2() -> Files:
    """A group of its own with 6 GiB and 3.5 cpus, under a parent with 4 GiB and 8 cpus."""
    pod, app = "sys/fs/cgroup/kubepods/pod1", "sys/fs/cgroup/kubepods/pod1/app"
    return {
        **_host(),
        "proc/self/cgroup": "0::/kubepods/pod1/app\n",
        f"{app}/cpu.max": "350000 100000\n",
        f"{app}/memory.max": f"{6 * GIB}\n",
        f"{app}/memory.current": f"{1 * GIB}\n",
        f"{app}/memory.stat": f"anon 1\ninactive_file {GIB // 4}\nactive_file 7\n",
        f"{pod}/cpu.max": "800000 100000\n",
        f"{pod}/memory.max": f"{4 * GIB}\n",
        f"{pod}/memory.current": f"{2 * GIB}\n",
        f"{pod}/memory.stat": f"anon 1\ninactive_file {GIB // 2}\n",
    }


def container_v1() -> Files:
    """A container whose group path is the host's and not under its own mount."""
    memory, cpu = "sys/fs/cgroup/memory", "sys/fs/cgroup/cpu,cpuacct"
    return {
        **_host(),
        "proc/self/cgroup": "5:cpuset:/docker/1f\n4:memory:/docker/1f\n3:cpu,cpuacct:/docker/1f\n",
        "sys/fs/cgroup/cpuset/cpuset.effective_cpus": "4-7\n",
        f"{cpu}/cpu.cfs_quota_us": "250000\n",
        f"{cpu}/cpu.cfs_period_us": "100000\n",
        f"{memory}/memory.limit_in_bytes": f"{2 * GIB}\n",
        f"{memory}/memory.usage_in_bytes": f"{1 * GIB}\n",
        f"{memory}/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB // 8}\n",
    }


def no_sys() -> Files:
    return {path: text for path, text in laptop().items() if not path.startswith("sys/")}


def phone() -> Files:
    """A Snapdragon 8 Gen 3: 2 little, 3 + 2 middle and 1 big core, SoC number 557."""
    parts = [(0x41, 0xD80)] * 2 + [(0x41, 0xD81)] * 5 + [(0x41, 0xD82)]
    speeds = [2_265_600] * 2 + [3_148_800] * 3 + [2_956_800] * 2 + [3_302_400]
    return {
        **cpuinfo_arm(f"{A76} i8mm bf16", parts),
        f"{CPU}/online": "0-7\n",
        **per_cpu("cpufreq/cpuinfo_max_freq", speeds),
        "sys/devices/soc0/soc_id": "557\n",
        "system/build.prop": "ro.product.model=x\n",
        **meminfo(11_400_000, 6_000_000),
        "proc/version": "Linux version 6.1.57-android14\n",
    }
