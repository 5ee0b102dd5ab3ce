"""The catalog: names, arithmetic, what vLLM is given, and what is only a claim."""

from __future__ import annotations

import pytest

from weightpath.errors import BadRequest
from weightpath.paths.catalog import CATALOG, WeightPath, find_path, stored_bits
from weightpath.paths.evidence import Evidence
from weightpath.paths.select import select_weight_path
from weightpath.scheme import INT8, Scheme

EXPECTED = (
    "w4a8-amx",
    "w4a8-vnni",
    "w4a8-avx2",
    "w4a16-tinygemm",
    "w8a16",
    "w4a16-cuda",
    "w8a16-cuda",
    "bf16",
    "fp16",
    "fp32",
    "export-qnn-w8a16",
)


def kwargs_on(profiles, device, priority="speed", runtime="weightpath"):
    chosen = select_weight_path(profiles[device], priority, runtime, evidence=Evidence())
    return chosen.path.as_engine_kwargs()


def test_the_catalog_holds_every_path_once_in_order():
    assert tuple(path.name for path in CATALOG) == EXPECTED


def test_an_unknown_path_is_refused_with_the_names_there_are():
    assert find_path("w8a16").scheme == INT8
    with pytest.raises(BadRequest, match="w4a8-amx"):
        find_path("w2a2")


@pytest.mark.parametrize("path", CATALOG, ids=lambda path: path.name)
def test_every_path_says_why_what_builds_it_and_what_runs_it(path: WeightPath):
    assert len(path.rationale.split()) > 4
    assert path.built_by
    assert path.kernels
    assert not path.fused_cpu_norms
    assert (path.engine_quantization is None) == (
        path.scheme is None or path.name.startswith("export")
    )


def test_cpu_paths_point_at_compiled_kernels_and_gpu_paths_at_those_compiled_on_first_use():
    for path in CATALOG:
        if path.scheme is None or path.name.startswith("export"):
            continue
        on_gpu = path.name.endswith("-cuda")
        assert path.native_kernel
        assert ("CUDA kernels, compiled at the first call" in path.kernels) == on_gpu
        assert ("without a C++ compiler" in path.kernels) != on_gpu


def test_stored_bits_are_the_arithmetic_of_the_scheme():
    assert stored_bits(Scheme(4, 128)) == 4.125
    assert stored_bits(Scheme(4, 128, symmetric=False)) == 4 + 20 / 128
    assert stored_bits(INT8) == 8 + 32 / 4096
    assert find_path("w4a8-amx").bits_per_weight == 4.15625
    assert find_path("w4a16-cuda").bits_per_weight == 4.15625
    assert find_path("fp32").bits_per_weight == 32


def test_another_group_size_changes_bits_and_build_command():
    changed = find_path("w4a16-cuda").with_scheme(Scheme(4, 32, symmetric=False))
    assert changed.group_size == 32
    assert changed.bits_per_weight == 4.625
    assert changed.built_by == "weightpath quantize MODEL -o DIR --scheme w4g32-asym"


def test_claims_say_whose_they_are():
    for path in CATALOG:
        for claim in path.claims:
            assert "authors" in claim or "the project's" in claim, path.name


def test_vllm_gets_nothing_for_a_phone(profiles):
    assert kwargs_on(profiles, "phone") == {}


@pytest.mark.parametrize("device", ["zen4", "avx2 laptop", "raspberry pi", "riscv"])
def test_vllm_gets_nothing_where_it_has_no_kernel_for_the_path(profiles, device):
    assert kwargs_on(profiles, device) == {}


def test_vllm_gets_the_quantization_and_only_a_dtype_that_decides_something(profiles):
    packed = {"quantization": "compressed-tensors"}
    assert kwargs_on(profiles, "amx xeon") == packed | {"dtype": "bfloat16"}
    assert kwargs_on(profiles, "amx xeon", "fidelity") == packed
    assert kwargs_on(profiles, "zen4", runtime="vllm") == packed
    assert kwargs_on(profiles, "h100") == packed
    assert kwargs_on(profiles, "t4") == packed | {"dtype": "float16"}
    assert kwargs_on(profiles, "jetson xavier") == {"dtype": "float16"}
    assert kwargs_on(profiles, "arm server", runtime="vllm") == {"dtype": "bfloat16"}


def test_int8_activations_in_vllm_are_switched_by_its_environment():
    assert dict(find_path("w4a8-amx").engine_environment) == {"VLLM_CPU_INT4_W4A8": "1"}
    assert dict(find_path("w4a16-tinygemm").engine_environment) == {"VLLM_CPU_INT4_W4A8": "0"}


def test_a_path_fits_or_says_one_sentence(profiles):
    for profile in profiles.values():
        for path in CATALOG:
            reason = path.fits(profile)
            assert reason is None or len(reason.split()) > 3
    assert find_path("w4a8-amx").fits(profiles["amx xeon"]) is None
    assert find_path("w8a16").fits(profiles["riscv"]) is None
    assert "npu_phone" in (find_path("bf16").fits(profiles["phone"]) or "")


def test_the_vllm_command_gives_what_the_engine_arguments_give(profiles):
    chosen = select_weight_path(profiles["amx xeon"], "speed", "vllm", evidence=Evidence())
    assert chosen.path.name == "w4a8-amx"
    assert chosen.vllm_command == (
        "VLLM_CPU_INT4_W4A8=1 vllm serve DIR --quantization compressed-tensors --dtype bfloat16"
    )
    assert chosen.to_dict()["path"]["vllm_command"] == chosen.vllm_command
    for name, value in chosen.path.as_engine_kwargs().items():
        assert f"--{name} {value}" in chosen.vllm_command
    split = chosen.path.vllm_command("my folder", tensor_parallel=2)
    assert split is not None
    assert "vllm serve 'my folder' " in split
    assert split.endswith(" --tensor-parallel-size 2")


@pytest.mark.parametrize("path", CATALOG, ids=lambda path: path.name)
def test_a_path_has_a_vllm_command_where_vllm_runs_it_and_nowhere_else(path: WeightPath):
    command = path.vllm_command()
    assert (command is None) == (not path.vllm)
    assert command is None or "vllm serve DIR" in command
