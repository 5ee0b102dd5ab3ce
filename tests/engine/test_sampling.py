"""Sampling: compiled against plain torch, both against transformers' own processors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from weightpath.engine.sampling import (
    Sampler,
    Sampling,
    TokenLogprob,
    choose_by_torch,
    kept,
)
from weightpath.errors import BadRequest, CannotRun
from weightpath.kernels.cpu import instruction_sets

needs_compiled = pytest.mark.skipif(
    "not in this install" in str(instruction_sets().get("scalar")), reason="no compiled kernels"
)


def logits_like_a_models(vocabulary: int, seed: int, peak: float = 3.0) -> Tensor:
    """A few likely tokens over a broad floor, as language models give."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(vocabulary, generator=generator) * 1.5
    some = torch.randint(vocabulary, (min(20, vocabulary),), generator=generator)
    made[some] += peak * torch.rand(len(some), generator=generator) * 4
    return made


def compiled_choice(
    logits: Tensor, seen: list[int], sampling: Sampling, uniform: float, top: int
) -> TokenLogprob | None:
    """`choose_by_torch`'s arguments to the compiled function."""
    sampler = Sampler(sampling, seen)
    sampler._seen = type(sampler._seen)("i", seen)
    return sampler._pick_compiled(logits, uniform, top)


def by_transformers(logits: Tensor, seen: list[int], sampling: Sampling) -> Tensor:
    """Probabilities [V] after transformers' processors, in its order."""
    scores, ids = logits[None].clone(), torch.tensor([seen or [0]])
    if sampling.repetition_penalty != 1.0 and seen:
        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores)  # type: ignore[arg-type]
    scores = TemperatureLogitsWarper(sampling.temperature)(ids, scores)  # type: ignore[arg-type]
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(ids, scores)  # type: ignore[arg-type]
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(ids, scores)  # type: ignore[arg-type]
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(ids, scores)  # type: ignore[arg-type]
    return scores[0].softmax(-1)


SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=50),
    Sampling(temperature=0.7, top_p=0.95),
    Sampling(temperature=1.3, min_p=0.05),
    Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02),
    Sampling(temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.3),
    Sampling(temperature=2.0, top_k=1),
    Sampling(temperature=2.0, top_p=0.0),
    Sampling(temperature=5.0, top_p=0.5),
    Sampling(temperature=0.5, min_p=1.0),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize("choose", [choose_by_torch, pytest.param(compiled_choice, marks=needs_compiled)])  # fmt: skip
def test_the_draws_are_those_of_transformers_probabilities(
    sampling: Sampling, choose: Callable[..., Any]
) -> None:
    """Walking u over a fine grid gives every token its share, and nothing to those cut off."""
    logits, seen = logits_like_a_models(300, seed=3), [1, 5, 5, 299, 17]
    wanted = by_transformers(logits, seen, sampling)
    grid = 2000
    drawn = Counter(choose(logits, seen, sampling, (i + 0.5) / grid, -1).token for i in range(grid))
    share = torch.tensor([drawn[i] / grid for i in range(300)])
    assert (share - wanted).abs().max() <= 1.01 / grid
    assert not share[wanted == 0].any()


@needs_compiled
@settings(max_examples=150, deadline=None)
@given(
    vocabulary=st.sampled_from([1, 2, 3, 127, 128, 129, 300, 1000, 5000]),
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7, 20.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 50, 200, 10**6]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    penalty=st.sampled_from([1.0, 1.2, 0.8]),
    uniform=st.floats(0, 1, exclude_max=True, allow_subnormal=False),
    rounded=st.booleans(),
    top=st.integers(-1, 7),
)
def test_compiled_and_torch_pick_the_same_token_and_probabilities(
    vocabulary: int, seed: int, temperature: float, top_k: int, top_p: float, min_p: float,
    penalty: float, uniform: float, rounded: bool, top: int,
) -> None:  # fmt: skip
    logits = logits_like_a_models(vocabulary, seed)
    if rounded:  # as bf16 heads do: many ties
        logits = logits.bfloat16().float()
    seen = torch.randint(vocabulary + 3, (9,), generator=torch.Generator().manual_seed(seed))
    sampling = Sampling(temperature, top_k, top_p, min_p, penalty)
    asked = (logits, seen.tolist(), sampling, uniform, top)
    plain, fast = choose_by_torch(*asked), compiled_choice(*asked)
    assert plain is not None
    assert fast is not None
    if plain.token != fast.token:  # a running sum within rounding of the draw, or of top-p's limit
        assert _a_sum_is_within_rounding(logits, seen.tolist(), sampling, uniform)
    elif top >= 0:
        assert fast.logprob == pytest.approx(plain.logprob, abs=1e-5)
    assert [i for i, _ in fast.best] == [i for i, _ in plain.best]
    assert [p for _, p in fast.best] == pytest.approx([p for _, p in plain.best], abs=1e-5)


def _a_sum_is_within_rounding(
    logits: Tensor, seen: list[int], sampling: Sampling, uniform: float
) -> bool:
    near = [choose_by_torch(logits, seen, sampling, min(max(uniform + d, 0.0), 1 - 1e-9), -1)
            for d in (-3e-6, 3e-6)]  # fmt: skip
    limits = [
        choose_by_torch(logits, seen, Sampling(**(vars(sampling) | {"top_p": p})), uniform, -1)
        for p in (max(sampling.top_p - 3e-6, 0.0), min(sampling.top_p + 3e-6, 1.0))
    ]
    return len({one.token for one in (*near, *limits) if one}) > 1


@needs_compiled
def test_a_large_vocabulary_gives_the_same_tokens_compiled_and_not() -> None:
    for seed, sampling in enumerate(SETTINGS * 2):
        logits = logits_like_a_models(151_936, seed)
        asked = (logits, [3, 9, 9], sampling, (seed + 0.5) / 20, 5)
        plain, fast = choose_by_torch(*asked), compiled_choice(*asked)
        assert plain is not None
        assert fast is not None
        assert plain.token == fast.token
        assert fast.logprob == pytest.approx(plain.logprob, abs=1e-5)


BROAD: dict[str, Callable[[Tensor], Tensor]] = {
    "broad": lambda x: x * 2,
    "flat": lambda x: x * 0.05,
    "steep": lambda x: x * 6,
    "all equal": lambda x: x * 0,
    "rounded as bf16 heads do": lambda x: (x * 2).bfloat16().float(),
    "two levels": lambda x: (x > 1).float() * 3,
    "one far above": lambda x: torch.cat([x[:7] * 2, x.new_tensor([60.0]), x[8:] * 2]),
    "some far below": lambda x: torch.where(x > 0, x, x * 1000),
    "sorted, so that blocks differ": lambda x: x.sort().values * 2,
}


@needs_compiled
@pytest.mark.parametrize("shape", BROAD)
@pytest.mark.parametrize("vocabulary", [8192, 8192 * 2 + 1, 49_152])
def test_a_nucleus_of_many_tokens_gives_the_same_tokens_compiled_and_not(
    vocabulary: int, shape: str
) -> None:
    """Vocabularies for which compiled top-p guesses where its limit lies (cpp/sample.cpp)."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = BROAD[shape](torch.randn(vocabulary, generator=generator))
    same = 0
    for top_p in (0.001, 0.5, 0.95, 0.9999):
        for temperature, uniform, min_p in ((0.7, 0.31, 0.0), (1.0, 0.999, 0.0), (0.7, 0.5, 0.03)):
            sampling = Sampling(temperature, 0, top_p, min_p)
            plain = choose_by_torch(logits, [], sampling, uniform, -1)
            fast = compiled_choice(logits, [], sampling, uniform, -1)
            assert plain is not None
            assert fast is not None
            same += plain.token == fast.token
            if plain.token != fast.token:
                assert _a_sum_is_within_rounding(logits, [], sampling, uniform)
    assert same >= 9  # of 12: with many light tokens a draw is often within rounding of two


@needs_compiled
def test_the_draws_of_a_broad_nucleus_have_its_probabilities() -> None:
    """Every token that the nucleus keeps comes at its running sum, and none that it leaves out."""
    logits = torch.randn(8192, generator=torch.Generator().manual_seed(1)) * 0.5
    sampling = Sampling(temperature=0.9, top_p=0.6)
    scores = logits.double()
    weights = torch.exp((scores - scores.max()) / 0.9)
    left = kept(scores, weights, sampling)
    running = torch.where(left, weights, 0.0).cumsum(0)
    grid = 1000
    for i in range(grid):
        uniform = (i + 0.5) / grid
        token = compiled_choice(logits, [], sampling, uniform, -1)
        assert token is not None
        assert left[token.token]
        assert abs(float(running[token.token] / running[-1]) - uniform) < 1e-3


@pytest.mark.parametrize("choose", [choose_by_torch, pytest.param(compiled_choice, marks=needs_compiled)])  # fmt: skip
def test_greedy_takes_the_lowest_id_of_equal_logits(choose: Callable[..., Any]) -> None:
    logits = torch.zeros(400)
    logits[[130, 131, 399]] = 2.0
    assert choose(logits, [], Sampling(), 0.0, -1).token == 130
    assert choose(logits, [130], Sampling(repetition_penalty=1.5), 0.0, -1).token == 131
    assert choose(-logits, [0, 1], Sampling(repetition_penalty=1.5), 0.0, -1).token == 0


@pytest.mark.parametrize("choose", [choose_by_torch, pytest.param(compiled_choice, marks=needs_compiled)])  # fmt: skip
def test_equal_logits_stand_or_fall_together_at_a_limit(choose: Callable[..., Any]) -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    for sampling in (Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.6)):
        drawn = {choose(logits, [], sampling, u / 100, -1).token for u in range(100)}
        assert drawn == {1, 2, 3, 4}


@pytest.mark.parametrize("choose", [choose_by_torch, pytest.param(compiled_choice, marks=needs_compiled)])  # fmt: skip
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("place", [0, 127, 128, 299])
def test_logits_that_are_not_finite_are_seen(
    choose: Callable[..., Any], bad: float, place: int
) -> None:
    logits = logits_like_a_models(300, 1)
    logits[place] = bad
    assert choose(logits, [], Sampling(), 0.0, -1) is None
    with pytest.raises(CannotRun, match="logits are not finite"):
        Sampler().pick(logits)


def test_a_seed_repeats_and_another_differs() -> None:
    logits = logits_like_a_models(300, 1)

    def tokens(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.5, seed=seed))
        return [sampler.pick(logits).token for _ in range(20)]

    assert tokens(1) == tokens(1) != tokens(2)
    assert tokens(None) != tokens(None)


def test_without_the_extension_a_seed_means_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = logits_like_a_models(3000, 4)
    sampling = Sampling(1.0, top_k=50, top_p=0.9, repetition_penalty=1.1, seed=5)
    sampler = Sampler(sampling, [1, 2], logprobs=3)
    wanted = [sampler.pick(logits) for _ in range(30)]

    def missing() -> Any:
        raise CannotRun("the CPU kernels are not in this install")

    monkeypatch.setattr("weightpath.engine.sampling.extension", missing)
    plain = Sampler(sampling, [1, 2], logprobs=3)
    assert not plain.compiled
    found = [plain.pick(logits) for _ in range(30)]
    assert [one.token for one in found] == [one.token for one in wanted]
    assert [one.logprob for one in found] == pytest.approx([p.logprob for p in wanted], abs=1e-5)


def test_tokens_that_were_picked_are_penalised_next() -> None:
    logits = torch.tensor([2.0, 1.9, 1.8, -1.0])
    sampler = Sampler(Sampling(repetition_penalty=1.2))
    assert [sampler.pick(logits).token for _ in range(3)] == [0, 1, 2]


def test_log_probabilities_are_the_models_own_before_any_setting() -> None:
    logits = logits_like_a_models(500, 2)
    sampler = Sampler(Sampling(0.3, top_k=4, repetition_penalty=1.5, seed=0), [1, 2], logprobs=4)
    picked = sampler.pick(logits)
    wanted = logits.double().log_softmax(0)
    assert picked.logprob == pytest.approx(float(wanted[picked.token]), abs=1e-5)
    assert [i for i, _ in picked.best] == logits.topk(4).indices.tolist()
    assert [p for _, p in picked.best] == pytest.approx(wanted.topk(4).values.tolist(), abs=1e-5)


def test_kept_marks_what_transformers_leaves() -> None:
    logits = logits_like_a_models(700, 9)
    for sampling in SETTINGS:
        if sampling.repetition_penalty == 1.0:
            scores = logits.double()
            weights = torch.exp((scores - scores.max()) / sampling.temperature)
            wanted = by_transformers(logits, [], sampling) > 0
            assert torch.equal(kept(scores, weights, sampling), wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -1.0}, "temperature -1.0: use 0 to 100"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"temperature": 1e-9}, "use 0 \\(greedy\\), or 0.001"),
        ({"temperature": True}, "temperature True"),
        ({"top_k": -1}, "top_k -1: use a whole number"),
        ({"top_k": 1.5}, "top_k 1.5"),
        ({"top_p": 1.1}, "top_p 1.1: use 0 to 1"),
        ({"min_p": "x"}, "min_p x"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0"),
        ({"seed": 1.0}, "seed 1.0"),
        ({"seed": 2**70}, "63 bits"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_one_clear_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        Sampling(**changes)


def test_logits_of_another_kind_are_refused_by_the_compiled_sampler() -> None:
    if Sampler().compiled:
        for wrong in (torch.zeros(4).double(), torch.zeros(1, 4), torch.zeros(8)[::2]):
            with pytest.raises(BadRequest, match="wanted fp32"):
                Sampler().pick(wrong)
