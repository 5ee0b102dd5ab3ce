"""Whether a model fits a device: the memory that counts, the sum, the context that would fit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightpath.device.profile import HardwareProfile, from_dict
from weightpath.paths.memory_fit import (
    CPU_RUNTIME,
    GPU_RUNTIME,
    MemoryFit,
    activation_bytes,
    memory_fit,
    memory_of,
)
from weightpath.paths.tensors import LinearShape, ModelShapes

SHAPES = ModelShapes(
    (LinearShape("a", 96, 32), LinearShape("lm_head", 64, 32, "head"),
     LinearShape("embed", 64, 32, "embedding")),
    False, "bfloat16", 2 * (96 * 32 + 2 * 64 * 32),
)  # fmt: skip
A_TOKEN = 100_000


def machine(**facts: Any) -> HardwareProfile:
    return from_dict({"arch": "x86_64"} | facts, "test")


def fitted(memory: int, context: int = 1000, **options: Any) -> MemoryFit:
    return memory_fit(
        machine(ram_total=memory), SHAPES, 10**9, lambda n: n * A_TOKEN, context, **options
    )


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        ({"ram_total": 100, "ram_available": 60}, (60, "RAM available")),
        ({"ram_total": 100}, (100, "RAM available")),
        ({"ram_total": 100, "accelerator": "cuda", "gpu_memory": 40}, (36, "GPU memory")),
        ({"ram_total": 100, "accelerator": "cuda"}, (0, "GPU memory")),
        ({"arch": "aarch64", "ram_total": 50, "accelerator": "cuda_unified", "gpu_memory": 64},
         (50, "memory shared with the GPU")),
        ({"arch": "aarch64", "ram_total": 8, "accelerator": "npu:qualcomm"}, (8, "RAM available")),
    ],
)  # fmt: skip
def test_the_memory_that_counts_is_the_devices_that_runs_it(
    facts: dict[str, Any], wanted: tuple[int, str]
) -> None:
    assert memory_of(machine(**facts)) == wanted


def test_the_sum_is_weights_cache_activations_runtime_and_a_tenth() -> None:
    fit = fitted(16 << 30)
    assert fit.activations == activation_bytes(SHAPES, 1000, 1)
    assert fit.activations == 1000 * (8 * 32 + 3 * 96) * 4 + 64 * 4
    assert fit.runtime == CPU_RUNTIME
    assert fit.margin == round((10**9 + 10**8 + fit.activations) / 10)
    assert fit.needed == 10**9 + 10**8 + fit.activations + CPU_RUNTIME + fit.margin
    assert fit.fits is True
    assert fit.sentence.startswith("fits: needs")
    gpu = memory_fit(machine(accelerator="cuda", gpu_memory=16 << 30), SHAPES, 1, lambda n: 0, 5)
    assert gpu.runtime == GPU_RUNTIME


@given(memory=st.integers(1_300_000_000, 40_000_000_000), context=st.integers(1, 200_000))
def test_the_largest_context_fits_and_one_more_does_not(memory: int, context: int) -> None:
    most = 200_000
    fit = fitted(memory, context, longest=most)
    found = fit.largest_context
    assert found is not None
    assert fit.fits == (context <= found)
    if found:
        assert fitted(memory, found, longest=most).fits
    if found < most:
        assert not fitted(memory, found + 1, longest=most).fits


def test_what_does_not_fit_says_what_would() -> None:
    some = fitted(2_000_000_000, 100_000)
    assert some.fits is False
    assert f"at most {some.largest_context:,} tokens of context do" in some.sentence
    none = fitted(1_000_000_000)
    assert none.largest_context == 0
    assert "no context does: use fewer bits" in none.sentence


def test_unknown_memory_is_neither_yes_nor_no() -> None:
    fit = fitted(0)
    assert (fit.fits, fit.largest_context) == (None, None)
    assert "is unknown" in fit.sentence
    assert json.loads(json.dumps(fit.to_dict()))["fits"] is None
