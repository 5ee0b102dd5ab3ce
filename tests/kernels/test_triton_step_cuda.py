"""The Triton kernels of a decode step on a GPU, against torch on the same device."""

from __future__ import annotations

import pytest
import torch
from step_inputs import SHAPES, Source, copied, far, queries, rotary, rows

from weightpath.kernels import step, step_plain
from weightpath.kernels.step import step_kernels
from weightpath.kernels.step_records import Rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Of the largest value: two roundings of the dtype."""


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def overlap(request: pytest.FixtureRequest) -> bool:
    """Programmatic dependent launch, where the GPU has it."""
    reason = step.overlap_refusal(torch.device("cuda"), "triton") if request.param else None
    if reason is not None:
        pytest.skip(reason)
    return request.param


@pytest.mark.parametrize("dtype", CLOSE)
def test_norms_and_activations_are_torchs(dtype: torch.dtype, overlap: bool) -> None:
    source, kernels = Source("cuda"), step_kernels(torch.device("cuda"), overlap=overlap)
    for width in (80, 4096, 14336):
        x, residual = (source.normal(5, width, dtype=dtype) for _ in range(2))
        weight = source.normal(width, dtype=dtype)
        for other in (residual, None):
            found = kernels.add_norm(x, other, weight, 1e-5)
            wanted = step_plain.add_norm(x, other, weight, 1e-5)
            assert max(map(far, found, wanted)) < CLOSE[dtype]
        gate, up = source.normal(5, 2 * width, dtype=dtype).chunk(2, dim=1)
        assert far(kernels.silu_times(gate, up), step_plain.silu_times(gate, up)) < CLOSE[dtype]


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("name", SHAPES)
def test_attention_is_torchs_and_twice_the_same_bits(
    name: str, dtype: torch.dtype, overlap: bool
) -> None:
    from weightpath.kernels.triton_step import attention

    source, shape = Source("cuda"), SHAPES[name]
    at = rows(source, shape, dtype)
    q, k, v = queries(source, shape, dtype)
    turn, plain = rotary(source, name, dtype), copied(at)
    wanted = step_plain.attend(q, k, v, plain, 1, turn, shape)
    for splits in (1, 4, None):
        mine, again = copied(at), copied(at)
        found = attention.attend(q, k, v, mine, 1, turn, shape, splits=splits, overlap=overlap)
        assert far(found, wanted) < CLOSE[dtype]
        assert max(map(far, mine.caches, plain.caches)) < CLOSE[dtype]
        second = attention.attend(q, k, v, again, 1, turn, shape, splits=splits, overlap=overlap)
        assert torch.equal(found, second)


def test_the_largest_of_a_whole_vocabulary_is_the_next_token() -> None:
    source, kernels = Source("cuda"), step_kernels(torch.device("cuda"))
    logits = source.normal(64, 128256, dtype=torch.bfloat16)
    logits[3, 9] = float("nan")
    state = torch.tensor([[1] * 64, list(range(64)), [0] * 64, [64] * 64], device="cuda")
    at, bad = Rows(state, []), torch.zeros(64, dtype=torch.int32, device="cuda")
    kernels.pick(logits, at, bad)
    largest = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    largest[3] = 0
    assert torch.equal(at.tokens, largest)
    assert at.positions.tolist() == [*range(1, 64), 63]
    assert bad.tolist() == [int(row == 3) for row in range(64)]
