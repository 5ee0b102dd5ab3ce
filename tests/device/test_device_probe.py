"""The probe on fixture roots of the machines that the product must know, and on this one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import machines
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machines import GIB, build

from weightpath.device.accelerators import NOT_ASKED, cuda_devices
from weightpath.device.files import cpu_ids
from weightpath.device.foreign import from_platform, from_sysctl
from weightpath.device.probe import probe
from weightpath.device.profile import FACTS, HardwareProfile, device_class, float_support, has_amx
from weightpath.errors import BadRequest

EVERY = (
    machines.zen4_vm, machines.xeon_h200, machines.laptop, machines.arm_server,
    machines.raspberry_pi, machines.jetson, machines.wsl2, machines.container_v2,
    machines.container_v1, machines.no_sys, machines.phone,
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_device_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEIGHTPATH_DEVICE", raising=False)


def read(tmp_path: Path, files: machines.Files) -> HardwareProfile:
    return probe(build(tmp_path, files))


def test_a_two_core_zen_4_vm_is_avx512_vnni_with_bf16_but_no_fp16(tmp_path: Path) -> None:
    found = read(tmp_path, machines.zen4_vm())
    assert device_class(found) == "x86_cpu/avx512_vnni"
    assert (found.arch, found.cpu_model) == ("x86_64", "AMD EPYC")
    assert {"avx512_vnni", "avx512_bf16", "avx512f", "sse3"} <= found.cpu_flags
    assert not has_amx(found)
    assert (found.logical_cores, found.physical_cores, found.numa_nodes) == (2, 2, 1)
    assert found.clusters == ((0, 1),)
    assert found.l3_cache == 32 << 20
    assert (found.ram_total, found.ram_available) == (24_684_084 << 10, 24_301_252 << 10)
    assert (found.supports_bf16, found.supports_fp16) == (True, False)
    assert (found.accelerator, found.accelerators) == ("none", ())
    assert found.sources["cpu_flags"] == "/proc/cpuinfo flags"
    assert found.sources["clusters"].endswith("cpu_capacity (no cpufreq)")
    assert found.sources["ram_total"] == "/proc/meminfo MemTotal"


def test_an_amx_xeon_lists_its_h200_as_unusable_since_the_library_is_not_asked(
    tmp_path: Path,
) -> None:
    found = read(tmp_path, machines.xeon_h200())
    assert device_class(found) == "x86_cpu/amx"
    assert has_amx(found)
    assert (found.logical_cores, found.physical_cores) == (16, 16)
    assert (found.supports_bf16, found.supports_fp16) == (True, True)
    (card,) = found.accelerators
    assert (card.kind, card.vendor, card.name) == ("cuda", "nvidia", "NVIDIA H200")
    assert (card.usable, card.reason) == (False, NOT_ASKED)
    assert (found.accelerator, found.gpu_capability) == ("none", None)


@pytest.mark.parametrize("missing", ["amx_int8", "amx_tile"])
def test_one_amx_flag_without_the_other_is_not_amx(tmp_path: Path, missing: str) -> None:
    files = machines.xeon_h200()
    files["proc/cpuinfo"] = files["proc/cpuinfo"].replace(missing, "")
    found = read(tmp_path, files)
    assert not has_amx(found)
    assert device_class(found) == "x86_cpu/avx512_vnni"


def test_the_same_xeon_as_a_profile_with_its_gpu_is_sm_90() -> None:
    found = probe(device="xeon-amx-h200")
    assert device_class(found) == "cuda_discrete/sm_90"
    assert has_amx(found)
    assert (found.gpu_name, found.gpu_sm_count, found.gpu_capability) == (
        "NVIDIA H200",
        132,
        (9, 0),
    )
    assert found.gpu_memory == 150_109_880_320
    assert [card.usable for card in found.accelerators] == [True]


def test_a_laptop_has_two_clusters_and_counts_sibling_threads_as_one_core(tmp_path: Path) -> None:
    found = read(tmp_path, machines.laptop())
    assert device_class(found) == "x86_cpu/avx2"
    assert (found.logical_cores, found.physical_cores) == (12, 8)
    assert found.clusters == (tuple(range(8)), (8, 9, 10, 11))
    assert found.l3_cache == 12 << 20
    assert found.thermal_zones == ("acpitz", "iwlwifi_1", "x86_pkg_temp")
    assert (found.supports_bf16, found.supports_fp16) == (False, False)
    assert found.sources["physical_cores"].endswith("topology/core_id")
    assert found.sources["clusters"].endswith("cpufreq/cpuinfo_max_freq")
    assert [(item.kind, item.vendor, item.name, item.usable) for item in found.accelerators] == [
        ("gpu", "intel", "Alder Lake-P GT2", False),
        ("npu", "intel", "Meteor NPU", False),
    ]
    assert all("no kernels for intel" in item.reason for item in found.accelerators)


def test_an_npu_of_a_laptop_does_not_make_it_a_phone(tmp_path: Path) -> None:
    assert read(tmp_path, machines.laptop()).accelerator == "none"


def test_an_arm_server_is_i8mm_with_its_cores_named_and_two_nodes_that_run_code(
    tmp_path: Path,
) -> None:
    found = read(tmp_path, machines.arm_server())
    assert device_class(found) == "arm64_cpu/i8mm"
    assert found.cpu_model == "Neoverse-V1"
    assert {"neon", "dotprod", "fp16", "i8mm", "bf16", "sve"} <= found.cpu_flags
    assert found.cpu_flags.isdisjoint({"asimd", "asimddp", "asimdhp"})
    assert (found.logical_cores, found.physical_cores, found.numa_nodes) == (64, 64, 2)
    assert found.clusters == (tuple(range(64)),)
    assert found.sources["clusters"].startswith("default: one cluster")
    assert (found.supports_bf16, found.supports_fp16) == (True, True)
    assert found.sources["cpu_flags"] == "/proc/cpuinfo Features"


def test_a_raspberry_pi_5_is_dotprod_and_names_its_board(tmp_path: Path) -> None:
    found = read(tmp_path, machines.raspberry_pi())
    assert device_class(found) == "arm64_cpu/dotprod"
    assert found.cpu_model == "Cortex-A76 (Raspberry Pi 5 Model B Rev 1.0)"
    assert (found.logical_cores, found.clusters) == (4, ((0, 1, 2, 3),))
    assert (found.supports_bf16, found.supports_fp16) == (False, True)
    assert found.thermal_zones == ("cpu-thermal",)
    assert found.accelerator == "none"


def test_a_jetson_orin_is_unified_cuda_of_capability_8_7(tmp_path: Path) -> None:
    found = read(tmp_path, machines.jetson())
    assert device_class(found) == "jetson/sm_87"
    assert (found.accelerator, found.gpu_name) == ("cuda_unified", "Orin")
    assert found.gpu_memory == found.ram_total == 64_349_000 << 10
    assert (found.supports_bf16, found.supports_fp16) == (True, True)
    assert found.cpu_model == "Cortex-A78AE (NVIDIA Jetson AGX Orin Developer Kit)"
    assert "nvidia,tegra234" in found.sources["accelerator"]
    assert found.gpu_sm_count == 0
    assert found.sources["gpu_sm_count"].startswith("default:")


def test_wsl2_is_known_by_its_kernel_and_its_virtual_gpu_is_listed(tmp_path: Path) -> None:
    found = read(tmp_path, machines.wsl2())
    assert found.host_os == "wsl2"
    assert device_class(found) == "x86_cpu/avx_vnni"
    assert (found.logical_cores, found.physical_cores) == (4, 2)
    (card,) = found.accelerators
    assert (card.vendor, card.usable) == ("microsoft", False)


def test_a_v2_container_gets_the_tightest_limit_of_its_group_and_the_parents(
    tmp_path: Path,
) -> None:
    found = read(tmp_path, machines.container_v2())
    assert found.logical_cores == 3  # 3.5 cpus of its own group, rounded down
    assert found.physical_cores == 3
    assert found.ram_total == 4 * GIB  # the parent's
    assert found.ram_available == 4 * GIB - 2 * GIB + GIB // 2
    assert found.sources["ram_total"] == "cgroup v2 memory.max"
    assert "cgroup v2 cpu.max (3.5 cpus)" in found.sources["logical_cores"]


def test_a_v1_container_gets_its_cpuset_quota_and_memory_limit(tmp_path: Path) -> None:
    found = read(tmp_path, machines.container_v1())
    assert found.clusters == ((4, 5, 6, 7),)
    assert found.logical_cores == 2  # 2.5 of the 4 in the cpuset
    assert found.ram_total == 2 * GIB
    assert found.ram_available == 1 * GIB + GIB // 8
    assert found.sources["ram_total"] == "cgroup v1 memory.limit_in_bytes"
    assert "cut to 4 by cgroup v1 cpuset.effective_cpus" in found.sources["logical_cores"]


def test_without_its_cgroup_the_same_container_sees_the_whole_host(tmp_path: Path) -> None:
    files = {path: text for path, text in machines.container_v2().items() if "cgroup" not in path}
    found = read(tmp_path, files)
    assert (found.logical_cores, found.ram_total, found.ram_available) == (16, 64 * GIB, 60 * GIB)


def test_a_machine_without_sys_still_counts_cores_from_cpuinfo(tmp_path: Path) -> None:
    found = read(tmp_path, machines.no_sys())
    assert device_class(found) == "x86_cpu/avx2"
    assert (found.logical_cores, found.physical_cores) == (12, 8)
    assert found.clusters == (tuple(range(12)),)
    assert found.ram_total == 16_000_000 << 10
    assert found.sources["logical_cores"] == "/proc/cpuinfo processor lines"
    for fact in ("clusters", "numa_nodes", "l3_cache", "thermal_zones"):
        assert found.sources[fact].startswith("default:"), fact


def test_a_phone_is_known_by_its_soc_number(tmp_path: Path) -> None:
    found = read(tmp_path, machines.phone())
    assert device_class(found) == "npu_phone/htp"
    assert (found.accelerator, found.host_os) == ("npu:qualcomm", "android")
    assert found.accelerators[0].name == "Hexagon HTP v75 (SM8650)"
    assert found.cpu_model == "1 x Cortex-X4 + 5 x Cortex-A720 + 2 x Cortex-A520"
    assert found.clusters == probe(device="snapdragon-8-gen-3").clusters


def test_an_empty_root_gives_a_profile_that_says_what_it_could_not_read(tmp_path: Path) -> None:
    found = probe(tmp_path)
    assert device_class(found) == "other_cpu/unknown"
    assert (found.logical_cores, found.ram_total) == (1, 0)
    for fact in ("arch", "cpu_model", "cpu_flags", "logical_cores", "ram_total", "ram_available"):
        assert found.sources[fact].startswith("default:"), fact


def test_a_riscv_board_is_another_cpu(tmp_path: Path) -> None:
    files = {"proc/cpuinfo": "processor\t: 0\nisa\t\t: rv64imafdcv_zba_zbb\nuarch\t: sifive,u74\n"}
    found = read(tmp_path, files)
    assert device_class(found) == "other_cpu/riscv64"
    assert {"v", "zba"} <= found.cpu_flags
    assert found.cpu_model == "sifive,u74"


def test_a_flag_that_one_core_lacks_is_not_claimed(tmp_path: Path) -> None:
    files = machines.zen4_vm()
    first, rest = files["proc/cpuinfo"].split("avx512_vnni", 1)
    found = read(tmp_path, {**files, "proc/cpuinfo": first + rest})
    assert "avx512_vnni" not in found.cpu_flags
    assert "avx2" in found.cpu_flags


def test_cores_of_two_sockets_or_dies_with_the_same_number_are_two(tmp_path: Path) -> None:
    files = {
        **machines.cpuinfo_x86("x", machines.AVX2, [0, 0]),
        f"{machines.CPU}/online": "0-1",
        **machines.per_cpu("topology/core_id", [0, 0]),
        **machines.per_cpu("topology/physical_package_id", [0, 1]),
    }
    assert read(tmp_path, files).physical_cores == 2


def test_an_offline_cpu_is_not_counted(tmp_path: Path) -> None:
    files = {**machines.zen4_vm(), f"{machines.CPU}/online": "1\n"}
    found = read(tmp_path, files)
    assert (found.logical_cores, found.clusters) == (1, ((1,),))


@pytest.mark.parametrize("machine", EVERY)
def test_every_fact_of_every_machine_has_a_source(machine, tmp_path: Path) -> None:
    found = read(tmp_path, machine())
    assert set(found.sources) == set(FACTS)
    assert all(found.sources.values())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    junk=st.text(st.characters(codec="utf-8"), max_size=40)
    | st.sampled_from(
        ["", "-1", "0-", "²", "0-99999999999", "9" * 40, "max", "0x", ":", "\n\n:\n"]
    ),
    which=st.integers(0),
)
def test_a_file_full_of_junk_costs_its_fact_and_nothing_else(
    junk: str, which: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    files = machines.container_v2() | machines.laptop()
    path = sorted(files)[which % len(files)]
    found = read(tmp_path_factory.mktemp("junk"), files | {path: junk})
    assert found.logical_cores >= 1
    assert set(found.sources) == set(FACTS)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("0-3,8", (0, 1, 2, 3, 8)),
        ("5", (5,)),
        ("2,0-1", (0, 1, 2)),
        ("", ()),
        ("a-b", ()),
        ("3-1", ()),
        ("0-99999999999", ()),
    ],
)
def test_a_cpu_list_is_read_as_the_kernel_writes_it(text: str, ids: tuple[int, ...]) -> None:
    assert cpu_ids(text) == ids


def test_a_root_that_is_no_folder_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="no such folder") as caught:
        probe(tmp_path / "absent")
    assert "\n" not in str(caught.value)


# The machine that runs the tests.


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads this machine's /proc")
def test_this_machine_agrees_with_the_system_calls() -> None:
    found = probe("/")
    allowed = os.sched_getaffinity(0)
    assert {cpu for cluster in found.clusters for cpu in cluster} <= allowed
    assert 1 <= found.physical_cores <= found.logical_cores <= len(allowed)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < found.ram_available <= found.ram_total <= pages * 1.01
    assert found.arch == os.uname().machine
    assert set(found.sources) == set(FACTS)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_affinity_lowers_the_live_count_but_not_that_of_another_root(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("only one cpu is allowed here, so there is nothing to lower")
    os.sched_setaffinity(0, {min(before)})
    try:
        live, other = probe("/"), read(tmp_path, machines.zen4_vm())
    finally:
        os.sched_setaffinity(0, before)
    assert (live.logical_cores, live.clusters) == (1, ((min(before),),))
    assert "sched_getaffinity" in live.sources["logical_cores"]
    assert other.logical_cores == 2


def test_the_gpu_library_says_why_it_has_no_device_or_lists_it() -> None:
    devices, problem = cuda_devices()
    assert bool(devices) != bool(problem)
    assert "\n" not in problem
    assert all(item.memory > 1 << 28 and item.sm_count > 0 for item in devices)


@pytest.mark.gpu
def test_the_live_profile_carries_what_the_gpu_library_reports() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    found = probe("/")
    assert found.accelerator in ("cuda", "cuda_unified")
    assert found.gpu_capability == torch.cuda.get_device_capability(0)
    assert found.accelerators[0].usable


# Systems without /proc.


def test_a_mac_is_read_from_its_kernel_values() -> None:
    values = {
        "hw.optional.arm64": "1", "hw.logicalcpu": "8", "hw.physicalcpu": "8",
        "hw.perflevel0.logicalcpu": "4", "hw.perflevel1.logicalcpu": "4",
        "machdep.cpu.brand_string": "Apple M2", "hw.memsize": str(16 * GIB),
        "hw.optional.arm.FEAT_DotProd": "1", "hw.optional.arm.FEAT_I8MM": "1",
        "hw.optional.arm.FEAT_BF16": "1", "hw.optional.arm.FEAT_SME": "0",
    }  # fmt: skip
    found = from_sysctl(values, available=5 * GIB)
    assert device_class(found) == "arm64_cpu/i8mm"
    assert found.cpu_flags == {"neon", "dotprod", "i8mm", "bf16"}
    assert found.clusters == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert (found.ram_total, found.ram_available) == (16 * GIB, 5 * GIB)
    assert found.host_os == "darwin"
    assert not found.accelerators[0].usable
    assert set(found.sources) == set(FACTS)


def test_an_intel_mac_has_its_avx_flags_under_the_kernels_names() -> None:
    values = {"machdep.cpu.features": "SSE4.1 AVX1.0", "machdep.cpu.leaf7_features": "AVX2 AVX512F"}
    found = from_sysctl(values, available=0)
    assert found.cpu_flags == {"sse4_1", "avx", "avx2", "avx512f"}
    assert device_class(found) == "x86_cpu/avx512"


def test_without_proc_the_counts_come_from_the_platform() -> None:
    found = from_platform(frozenset({"avx2"}))
    assert found.logical_cores == os.cpu_count()
    assert found.ram_total > found.ram_available > 0
    assert set(found.sources) == set(FACTS)


@pytest.mark.parametrize(
    ("accelerator", "flags", "capability", "wanted"),
    [
        ("none", {"amx_bf16"}, None, (True, False)),
        ("none", {"avx512_fp16"}, None, (False, True)),
        ("none", {"avx2"}, None, (False, False)),
        ("cuda", {"avx512_bf16"}, (7, 5), (False, True)),
        ("cuda", set(), (8, 0), (True, True)),
        ("cuda", set(), None, (False, False)),
        ("npu:qualcomm", {"bf16"}, None, (False, False)),
    ],
)
def test_float_support_is_that_of_the_device_that_runs_the_model(
    accelerator: str, flags: set[str], capability: tuple[int, int] | None, wanted: tuple[bool, bool]
) -> None:
    assert float_support(accelerator, frozenset(flags), capability) == wanted
