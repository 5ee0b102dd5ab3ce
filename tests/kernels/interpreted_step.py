"""The Triton kernels of a decode step in Triton's interpreter, against torch. test_triton_step.py runs
this file in a process of its own: importing `interpreter` is for a whole process."""

from __future__ import annotations

import interpreter  # noqa: F401  (before any kernel)
import pytest
import torch
from step_inputs import SHAPES, Source, copied, far, queries, rotary, rows

from tiny_checkpoint import build_model
from weightpath.engine.graph import GraphModel
from weightpath.kernels import step_plain
from weightpath.kernels.step import step_kernels
from weightpath.kernels.step_records import Rows
from weightpath.kernels.triton_step import attention
from weightpath.nn.swap import quantize_model, set_backend

KERNELS = step_kernels(torch.device("cpu"), "triton")
CLOSE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Of the largest value. The interpreter cuts where a device rounds to bf16."""
DTYPES = tuple(CLOSE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_is_added_and_the_sum_normed(dtype: torch.dtype) -> None:
    source = Source()
    x, residual, weight = (source.normal(*size, dtype=dtype) for size in ((3, 80), (3, 80), (80,)))
    for other in (residual, None):
        found = KERNELS.add_norm(x, other, weight, 1e-5)
        wanted = step_plain.add_norm(x, other, weight, 1e-5)
        assert max(map(far, found, wanted)) < CLOSE[dtype]
    assert far(KERNELS.add_norm(x, residual, weight, 1.0)[1], wanted[1]) > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_multiplies_rows_that_are_apart(dtype: torch.dtype) -> None:
    gate, up = Source().normal(3, 3000, dtype=dtype).chunk(2, dim=1)
    assert far(KERNELS.silu_times(gate, up), step_plain.silu_times(gate, up)) < CLOSE[dtype]


@pytest.mark.parametrize("name", SHAPES)
def test_attention_is_torchs_for_every_shape_and_number_of_splits(name: str) -> None:
    for dtype in (torch.float32, torch.float16):  # of bf16 products the interpreter has none
        source, shape = Source(), SHAPES[name]
        at = rows(source, shape, dtype)
        q, k, v = queries(source, shape, dtype)
        turn = rotary(source, name, dtype)
        plain = copied(at)
        wanted = step_plain.attend(q, k, v, plain, 1, turn, shape)
        for splits in (1, 4) if dtype == torch.float32 else (2,):
            mine = copied(at)
            found = attention.attend(q, k, v, mine, 1, turn, shape, splits=splits)
            assert far(found, wanted) < CLOSE[dtype]
            assert max(map(far, mine.caches, plain.caches)) < CLOSE[dtype]


def test_the_largest_logit_is_the_next_token_and_of_equals_the_lowest() -> None:
    logits = Source().normal(4, 5000)
    logits[1, 77] = logits[1, 4000] = 9.0
    logits[2, 3], logits[3, 4999] = float("nan"), float("-inf")
    state = torch.tensor([[1] * 4, [0, 5, 15, 2], [0] * 4, [16, 8, 16, 8]])
    at, bad = Rows(state, []), torch.zeros(4, dtype=torch.int32)
    plain, bad_plain = Rows(state.clone(), []), bad.clone()
    KERNELS.pick(logits, at, bad)
    step_plain.pick(logits, plain, bad_plain)
    assert at.tokens[:2].tolist() == plain.tokens[:2].tolist() == [int(logits[0].argmax()), 77]
    assert at.positions.tolist() == plain.positions.tolist() == [1, 6, 15, 3]
    assert bad.tolist() == bad_plain.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_whole_step_of_several_rows_gives_the_logits_of_the_plain_kernels(kind: str) -> None:
    model = build_model(kind)
    quantize_model(model, "w4g32")
    set_backend(model, "torch")
    found = []
    for kernels in ("triton", "plain"):
        engine = GraphModel.of(model, kernels=kernels)
        sessions = [engine.session(64) for _ in range(3)]
        for length, session in enumerate(sessions, 2):
            session.extend(list(range(5, 5 + length)))
        steps = [engine.extend_many(sessions, [7 + step] * 3).clone() for step in range(2)]
        found.append(torch.stack(steps))
        if kernels == "triton":
            picked = engine.greedy([[5, 6, 7]], 3)
        else:
            assert picked == engine.greedy([[5, 6, 7]], 3)
    assert far(*found) < 1e-5
