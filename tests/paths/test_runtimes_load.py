"""What each runtime loads: the sentence names the limit and the version it was read from."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from weightpath.errors import BadRequest
from weightpath.paths.runtimes import ACCEPTS, RUNTIMES, find_runtime, loads
from weightpath.scheme import INT8, Scheme

W4 = Scheme(4, 64)
W4_ASYMMETRIC = Scheme(4, 64, symmetric=False)
W4A8 = Scheme(4, 64, activation_bits=8)

LOADED = [
    ("vllm", W4, "zen4"),
    ("vllm", W4_ASYMMETRIC, "zen4"),
    ("vllm", Scheme(4), "zen4"),
    ("vllm", W4A8, "amx xeon"),
    ("vllm", None, "avx2 laptop"),
    ("vllm", None, "arm server"),
    ("vllm", W4, "h100"),
    ("vllm", W4_ASYMMETRIC, "t4"),
    ("vllm", INT8, "jetson orin"),
    ("transformers", W4_ASYMMETRIC, "raspberry pi"),
    ("transformers", INT8, "riscv"),
    ("transformers", Scheme(3, 128), "h100"),
    ("weightpath", W4A8, "avx only"),
    ("weightpath", INT8, "phone"),
    ("weightpath", INT8, "riscv"),
    # GGUF, which `weightpath convert` makes of what quantize writes
    ("llama.cpp", W4, "zen4"),
    ("llama.cpp", W4A8, "arm server"),
    ("llama.cpp", W4_ASYMMETRIC, "h100"),
    ("llama.cpp", INT8, "riscv"),
    ("llama.cpp", None, "raspberry pi"),
]

REFUSED = [
    ("vllm", INT8, "zen4", "vLLM 0.32.0's CPU kernel takes 4-bit weights only, not an int8 head"),
    ("vllm", W4, "avx2 laptop", "needs avx512f, which this CPU lacks"),
    ("vllm", W4, "arm server", "vLLM 0.32.0 on Arm cannot load .* aarch64 build"),
    ("vllm", W4A8, "zen4", "16-bit activations without AMX tiles"),
    ("vllm", W4A8, "amx without int8", "16-bit activations without AMX tiles"),
    ("vllm", Scheme(4, 33), "zen4", "multiple of 2"),
    ("vllm", None, "avx only", "needs avx2"),
    ("vllm", Scheme(4, 48), "h100", "groups of 32, 64, 128 or whole rows, not 48"),
    ("vllm", Scheme(8, symmetric=False), "h100", "without zero points only"),
    ("vllm", W4, "jetson xavier", "compute capability 7.5, this GPU has 7.2"),
    ("vllm", W4, "unknown gpu", "this GPU has an unknown one"),
    ("vllm", W4A8, "h100", "not with int8 ones"),
    ("vllm", None, "phone", "does not run on android"),
    ("vllm", None, "riscv", "never read"),
    ("transformers", W4A8, "zen4", "16-bit activations, not with int8 ones"),
    ("transformers", W4, "phone", "exported graph"),
    ("weightpath", Scheme(8, 128), "zen4", "per output channel only"),
    ("weightpath", Scheme(3, 64), "zen4", "4-bit and 8-bit weights only"),
    ("weightpath", W4, "phone", "takes 8-bit weights only"),
    ("weightpath", None, "phone", "not the model's own dtype"),
    ("llama.cpp", Scheme(4, 48), "zen4", "groups that are a multiple of 32"),
    ("llama.cpp", Scheme(8, symmetric=False), "h100", "without zero points only"),
    ("llama.cpp", W4, "phone", "exported graph"),
]


@pytest.mark.parametrize(("runtime", "scheme", "device"), LOADED)
@pytest.mark.parametrize("role", ["linear", "head"])
def test_a_runtime_loads(profiles, runtime, scheme, device, role):
    if (runtime, role, scheme) == ("transformers", "head", INT8):
        assert "garbles an int8 head" in (loads(runtime, scheme, role, profiles[device]) or "")
        return
    assert loads(runtime, scheme, role, profiles[device]) is None


@pytest.mark.parametrize(("runtime", "scheme", "device", "sentence"), REFUSED)
def test_a_runtime_refuses_with_a_sentence(profiles, runtime, scheme, device, sentence):
    refusal = loads(runtime, scheme, "head", profiles[device])
    assert refusal is not None
    assert re.search(sentence, refusal), refusal


def test_the_cpu_kernel_of_vllm_wants_rows_of_whole_32s(profiles):
    rows = Scheme(4)
    assert loads("vllm", rows, "linear", profiles["zen4"], in_features=96) is None
    assert "32, not 100" in (loads("vllm", rows, "linear", profiles["zen4"], 100) or "")
    assert loads("vllm", rows, "linear", profiles["h100"], in_features=100) is None
    narrow = loads("vllm", rows, "linear", profiles["zen4"], 96, out_features=40)
    assert "out_features that are a multiple of 32, not 40" in (narrow or "")


def test_gguf_blocks_want_rows_of_whole_32s_and_replicate_a_scale_of_a_row(profiles):
    assert loads("llama.cpp", INT8, "head", profiles["zen4"], 96, 40) is None
    refusal = loads("llama.cpp", INT8, "head", profiles["zen4"], 100) or ""
    assert "in_features that are a multiple of 32, not 100" in refusal


def test_llama_cpp_is_said_to_need_a_conversion():
    assert "weightpath convert DIR --to gguf" in find_runtime("llama.cpp").computes


def test_vllm_is_refused_on_hosts_it_does_not_run_on(profiles):
    assert loads("vllm", W4, "linear", replace(profiles["zen4"], host_os="wsl2")) is None
    assert "windows" in (
        loads("vllm", W4, "linear", replace(profiles["zen4"], host_os="windows")) or ""
    )


def test_every_fact_belongs_to_a_known_runtime_that_says_what_was_read():
    names = {runtime.name for runtime in RUNTIMES}
    assert names == {"weightpath", "vllm", "transformers", "llama.cpp"}
    assert {runtime for runtime, _ in ACCEPTS} <= names
    assert all(runtime.read_from and runtime.computes for runtime in RUNTIMES)
    with pytest.raises(BadRequest, match="unknown"):
        find_runtime("exllama")
