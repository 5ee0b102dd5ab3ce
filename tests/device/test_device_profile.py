"""Classes, flag names, and a profile as JSON: strict, whole, and in place of the probe."""

from __future__ import annotations

import json
from pathlib import Path

import machines
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightpath.device.probe import probe, shipped_profiles
from weightpath.device.profile import (
    FACTS,
    FIELDS,
    Accelerator,
    HardwareProfile,
    device_class,
    from_dict,
    hardware_class,
    normalise_flags,
    to_dict,
)
from weightpath.errors import BadRequest


@pytest.fixture(autouse=True)
def no_device_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEIGHTPATH_DEVICE", raising=False)


def refused(data: object) -> str:
    """The message that `from_dict` refuses `data` with, which must be one line."""
    with pytest.raises(BadRequest) as caught:
        from_dict(data, "laptop.json")
    message = str(caught.value)
    assert message.startswith("laptop.json: ")
    assert "\n" not in message
    return message


def test_the_classes_are_decided_in_order_npu_unified_cuda_arm_x86() -> None:
    def named(arch: str, accelerator: str) -> str:
        return hardware_class(HardwareProfile(arch=arch, accelerator=accelerator))

    assert named("x86_64", "npu:intel") == named("aarch64", "npu:qualcomm") == "npu_phone"
    assert named("aarch64", "cuda_unified") == "jetson"
    assert named("aarch64", "cuda") == named("x86_64", "cuda") == "cuda_discrete"
    assert named("aarch64", "none") == "arm64_cpu"
    assert named("x86_64", "none") == "x86_cpu"
    assert named("armv7l", "none") == named("riscv64", "none") == "other_cpu"


@pytest.mark.parametrize(
    ("arch", "flags", "wanted"),
    [
        ("x86_64", "amx_tile amx_int8 avx512f avx512_vnni", "x86_cpu/amx"),
        ("x86_64", "amx_tile amx_bf16 avx512f avx512_vnni", "x86_cpu/avx512_vnni"),
        ("x86_64", "avx2 avx_vnni", "x86_cpu/avx_vnni"),
        ("x86_64", "avx2 avx512f avx512bw", "x86_cpu/avx512"),
        ("x86_64", "avx avx2", "x86_cpu/avx2"),
        ("x86_64", "avx", "x86_cpu/sse"),
        ("aarch64", "neon dotprod i8mm", "arm64_cpu/i8mm"),
        ("aarch64", "neon dotprod", "arm64_cpu/dotprod"),
        ("aarch64", "neon", "arm64_cpu/neon"),
        ("ppc64le", "", "other_cpu/ppc64le"),
    ],
)
def test_the_tier_is_the_fastest_int8_product_that_all_flags_allow(
    arch: str, flags: str, wanted: str
) -> None:
    assert device_class(HardwareProfile(arch=arch, cpu_flags=frozenset(flags.split()))) == wanted


def test_a_gpu_without_a_capability_is_sm_unknown_and_another_npu_goes_by_its_vendor() -> None:
    assert device_class(HardwareProfile("x86_64", accelerator="cuda")) == "cuda_discrete/sm_unknown"
    phone = HardwareProfile("aarch64", accelerator="npu:mediatek")
    assert device_class(phone) == "npu_phone/mediatek"


def test_flags_get_one_name_each() -> None:
    spelt = ["asimd", "asimddp", "asimdhp", "avx512f", "AVX512-VNNI", "pni", "AVX1.0", "amx-tile"]
    assert normalise_flags(spelt) == {
        "neon", "dotprod", "fp16", "avx512f", "avx512_vnni", "sse3", "avx", "amx_tile",
    }  # fmt: skip


@given(st.sets(st.text("abcdefgx0123456789_-. ASIMDHPV", max_size=12)))
def test_normalising_flags_twice_changes_nothing(flags: set[str]) -> None:
    once = normalise_flags(flags)
    assert normalise_flags(once) == once


PROFILES = st.builds(
    HardwareProfile,
    arch=st.sampled_from(["x86_64", "aarch64", "riscv64"]),
    cpu_model=st.text(max_size=20),
    cpu_flags=st.frozensets(st.sampled_from(["avx2", "neon", "amx_tile", "i8mm"])),
    logical_cores=st.integers(1, 512),
    physical_cores=st.integers(1, 512),
    clusters=st.lists(st.integers(0, 500), unique=True).map(lambda ids: (tuple(ids),)),
    numa_nodes=st.integers(1, 8),
    l3_cache=st.integers(0, 1 << 40),
    ram_total=st.integers(0, 1 << 50),
    ram_available=st.integers(0, 1 << 50),
    accelerator=st.sampled_from(["none", "cuda", "cuda_unified", "npu:qualcomm"]),
    gpu_capability=st.none() | st.tuples(st.integers(1, 12), st.integers(0, 9)),
    supports_bf16=st.booleans(),
    supports_fp16=st.booleans(),
    thermal_zones=st.lists(st.text(max_size=8), max_size=3).map(tuple),
    host_os=st.sampled_from(["linux", "wsl2", "android", "darwin", "windows"]),
    accelerators=st.lists(
        st.builds(
            Accelerator,
            kind=st.just("gpu"),
            vendor=st.text(max_size=5),
            name=st.text(max_size=5),
            usable=st.booleans(),
            reason=st.text(max_size=9),
        ),
        max_size=2,
    ).map(tuple),
    sources=st.dictionaries(st.sampled_from(FACTS), st.text(max_size=9)),
)


@given(PROFILES)
def test_a_profile_goes_through_json_and_comes_back_the_same(profile: HardwareProfile) -> None:
    assert from_dict(json.loads(json.dumps(to_dict(profile)))) == profile


def test_json_holds_flags_as_a_sorted_list_and_the_capability_as_a_pair() -> None:
    data = to_dict(probe(device="xeon-amx-h200"))
    assert data["cpu_flags"] == sorted(data["cpu_flags"])
    assert data["gpu_capability"] == [9, 0]
    assert list(data) == list(FIELDS)


def test_a_profile_of_arch_and_cores_alone_gets_sensible_defaults() -> None:
    found = from_dict(
        {"arch": "AMD64", "logical_cores": 4, "cpu_flags": ["avx512-bf16"], "ram_total": 7}
    )
    assert (found.arch, found.physical_cores, found.clusters) == ("x86_64", 4, ((0, 1, 2, 3),))
    assert (found.ram_available, found.supports_bf16) == (7, True)


def test_an_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    message = refused({"arch": "x86_64", "cpu_flag": []})
    assert "unknown key 'cpu_flag'" in message
    assert "did you mean 'cpu_flags'?" in message


def test_a_missing_arch_is_refused() -> None:
    assert "'arch' is missing" in refused({"cpu_flags": []})


@pytest.mark.parametrize("data", [[], None, "x86_64", 3])
def test_what_is_no_object_is_refused(data: object) -> None:
    assert "is not a profile" in refused(data)


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("arch", "", "a name such as"),
        ("arch", 64, "a name such as"),
        ("cpu_flags", "avx2", "a list of names"),
        ("cpu_flags", [1], "a list of names"),
        ("logical_cores", 0, "from 1 to 65536"),
        ("logical_cores", True, "from 1 to 65536"),
        ("logical_cores", 10**12, "from 1 to 65536"),
        ("physical_cores", 2.0, "from 1 to 65536"),
        ("clusters", [[0, 1], [1]], "each id once"),
        ("clusters", [0, 1], "a list of lists"),
        ("ram_total", -1, "bytes"),
        ("ram_total", "16 GB", "bytes"),
        ("accelerator", "rocm", "'npu:<vendor>'"),
        ("accelerator", "npu:", "'npu:<vendor>'"),
        ("gpu_capability", [9], "a pair such as [9, 0]"),
        ("gpu_capability", "9.0", "a pair such as [9, 0]"),
        ("supports_bf16", "yes", "true or false"),
        ("supports_fp16", 1, "true or false"),
        ("host_os", "solaris", "one of linux"),
        ("accelerators", [{"kind": "gpu"}], "kind, vendor, name, usable"),
        ("accelerators", [{"kind": "gpu", "vendor": "a", "name": "b", "usable": 1}], "usable"),
        ("sources", {"nonsense": "x"}, "field names"),
        ("cpu_model", "x" * 500 + "\n", None),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_accepted(
    key: str, value: object, accepted: str | None
) -> None:
    data = {"arch": "x86_64", key: value}
    if accepted is None:  # long text is text
        assert from_dict(data).cpu_model == value
        return
    message = refused(data)
    assert f"'{key}' is" in message
    assert accepted in message


def test_two_phones_are_shipped_and_are_npu_phones() -> None:
    for name, version in (("snapdragon-8-elite", "v79"), ("snapdragon-8-gen-3", "v75")):
        found = probe(device=name)
        assert device_class(found) == "npu_phone/htp"
        assert version in found.accelerators[0].name
        assert sum(len(cluster) for cluster in found.clusters) == found.logical_cores == 8
        assert found.sources["ram_total"].startswith("shipped profile")


@pytest.mark.parametrize("name", shipped_profiles())
def test_every_shipped_profile_has_a_source_for_every_fact(name: str) -> None:
    assert set(probe(device=name).sources) == set(FACTS)


def write(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data))
    return path


def test_a_file_replaces_the_probe_and_wins_over_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machines.build(tmp_path / "root", machines.zen4_vm())
    first = write(tmp_path / "first.json", {"arch": "aarch64", "cpu_flags": ["asimd"]})
    second = write(tmp_path / "second.json", {"arch": "riscv64"})
    assert probe(root).arch == "x86_64"
    monkeypatch.setenv("WEIGHTPATH_DEVICE", str(first))
    assert device_class(probe(root)) == "arm64_cpu/neon"
    assert probe(root).sources["cpu_flags"] == "JSON file first.json"
    assert probe(root).sources["ram_total"] == "default: not in JSON file first.json"
    assert probe(root, device=second).arch == "riscv64"
    assert hardware_class(probe(root, device="snapdragon-8-elite")) == "npu_phone"
    monkeypatch.setenv("WEIGHTPATH_DEVICE", "")
    assert probe(root).arch == "x86_64"


def test_the_variable_may_name_a_shipped_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTPATH_DEVICE", "snapdragon-8-gen-3")
    assert hardware_class(probe()) == "npu_phone"


def test_an_absent_device_is_refused_with_the_shipped_names() -> None:
    with pytest.raises(BadRequest, match="snapdragon-8-elite"):
        probe(device="snapdragon-9")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"arch": "x86_64",\n "cpu_flags": [}', "line 2 column 16"),
        (b"", "not JSON, line 1"),
        (b"\xff\xfe\x00\xd8", "not JSON"),
        (b'{"arch": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'"x86_64"', "is not a profile"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_in_one_line(
    content: bytes, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(BadRequest) as caught:
        probe(device=path)
    assert problem in str(caught.value)
    assert "bad.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_device_file(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="cannot be read"):
        probe(device=tmp_path)
