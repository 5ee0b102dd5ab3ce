"""The operators without a GPU: what they refuse, in words, and their fakes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tile_packer import random_tiles
from torch._subclasses.fake_tensor import FakeTensorMode

from weightpath.errors import CannotRun
from weightpath.kernels.triton import available, ops


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_asking_without_cuda_says_why() -> None:
    codes, scale = torch.zeros((3, 64), dtype=torch.int8), torch.ones(3)
    x = torch.zeros((1, 64), dtype=torch.bfloat16)
    with pytest.raises(CannotRun, match="run on CUDA; this layer is on cpu"):
        ops.int8_linear(x, codes, scale)
    tiles = random_tiles(64, 64, 64, 0)
    with pytest.raises(CannotRun, match="on cpu"):
        ops.int4_linear(x, tiles.codes, tiles.scales, None, None, 64, 64)
    with pytest.raises(CannotRun, match="on cpu"):
        ops.dequantize(tiles.codes, tiles.scales, None, 64, 64, 64, torch.float16)
    assert "CUDA" in (available.refusal("cuda") or "")


def test_an_old_device_and_a_missing_triton_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(available, "has_triton", lambda: True)
    assert "Tesla T4 has 7.5" in (available.refusal("cuda") or "")
    monkeypatch.setattr(available, "has_triton", lambda: False)
    assert "Triton is not installed" in (available.refusal("cuda") or "")


@pytest.mark.parametrize(
    ("n", "k", "group_size", "dtype", "split_k", "said"),
    [
        (100, 512, 128, torch.float16, 1, "out_features in multiples of 64, got 100"),
        (64, 512, 128, torch.float16, 5, "in_features in multiples of 160, got 512"),
        (64, 512, 128, torch.bfloat16, 1, "float16, not torch.bfloat16"),
        (64, 512, 32, torch.float16, 1, "groups of 64 or 128 columns, not 32"),
    ],
)
def test_the_awq_kernel_says_what_it_needs(
    n: int,
    k: int,
    group_size: int,
    dtype: torch.dtype,
    split_k: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(available, "refusal", lambda device: None)
    monkeypatch.setattr(available, "capability_of", lambda device: (9, 0))
    reason = available.awq_refusal("cuda", n, k, group_size, dtype, split_k)
    assert said in (reason or "")
    assert available.awq_refusal("cuda", 64, 512, 128, torch.float16, 1) is None


def test_a_split_of_k_always_suits_the_awq_kernel() -> None:
    for rows in (1, 40, 500):
        for n, k in ((64, 512), (4096, 4096), (4096, 14336), (128, 1152), (28672, 4096)):
            split = available.awq_split(rows, n, k)
            assert k % (32 * split) == 0
            assert split == 1 or k // split >= 512
    assert available.awq_split(1, 28672, 4096) == 1


def test_fakes_have_the_shapes_and_dtypes_of_results() -> None:
    with FakeTensorMode():
        x = torch.empty((2, 3, 128), dtype=torch.bfloat16)
        codes, scale = torch.empty((70, 128), dtype=torch.int8), torch.empty(70)
        y = torch.ops.weightpath.triton_int8_linear(x, codes, scale, None, torch.float32, "")
        assert (y.shape, y.dtype) == ((2, 3, 70), torch.float32)
        words = torch.empty((2, 2, 4, 32, 4), dtype=torch.int32)
        scales = torch.empty((2, 1, 64))
        y = torch.ops.weightpath.triton_int4_linear(
            x, words, scales, None, None, 70, 128, torch.bfloat16, ""
        )
        assert (y.shape, y.dtype) == ((2, 3, 70), torch.bfloat16)
        weight = torch.ops.weightpath.triton_dequantize(
            words, scales, None, 70, 128, 128, torch.float16
        )
        assert (weight.shape, weight.dtype) == ((70, 128), torch.float16)
        awq = torch.empty((64, 16), dtype=torch.int32)
        x = x.half()
        y = torch.ops.weightpath.triton_awq_linear(x, awq, awq, awq, None, 128, 1)
        assert (y.shape, y.dtype) == ((2, 3, 64), torch.float16)


def test_importing_the_operators_imports_no_triton() -> None:
    code = "import sys, weightpath.kernels.triton.ops; print('triton' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
