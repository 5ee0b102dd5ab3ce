"""Which token comes next: settings, and a sampler that draws from fp32 logits.

    s = logits, divided by the repetition penalty where positive and multiplied where negative, for
        ids in the prompt or the reply so far
    w = exp((s - max s) / temperature)
    top-k: the k largest s; top-p: of those the smallest set whose strictly larger members weigh less
    than p; min-p: of those w >= min_p; then one draw in proportion to w

This is transformers' order of processors. Tokens of equal logits stand or fall together at each
limit (bf16 heads tie often). temperature 0 is greedy: the largest s, of equals the lowest id.
Log-probabilities are of the model's own distribution, log softmax of the logits as they came.

The draw is the first id, ascending, whose running sum of w exceeds u times the sum; u is the next
number of Python's `random.Random(seed)`, so a seed means the same token everywhere. cpp/sample.cpp
does it where the extension is compiled, `choose_by_torch` elsewhere; they differ only where a sum
of w lies within rounding (1e-6) of a limit.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from weightpath.errors import BadRequest, CannotRun
from weightpath.kernels.cpu import extension

MOST_SEED = 2**63
NOT_FINITE = "logits are not finite; fp16 ends at 65504: load with dtype=torch.bfloat16, or inspect the weights"


def _within(name: str, value: float, low: float, high: float, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise BadRequest(f"{name} {value}: use {low:g} to {high:g}; {meaning}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Sampling:
    """How tokens are picked. temperature 0: greedy. top_k 0, top_p 1, min_p 0 and
    repetition_penalty 1 change nothing. seed None: different every time. BadRequest where a value
    is out of its range."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0.0, 100.0, "0 is greedy")
        _within("top_p", self.top_p, 0.0, 1.0, "1 keeps all tokens")
        _within("min_p", self.min_p, 0.0, 1.0, "0 keeps all tokens")
        _within("repetition_penalty", self.repetition_penalty, 0.01, 100.0, "1 is none")
        if not _is_int(self.top_k) or self.top_k < 0:
            raise BadRequest(f"top_k {self.top_k}: use a whole number from 0; 0 keeps all tokens")
        if self.seed is not None and not (_is_int(self.seed) and abs(self.seed) <= MOST_SEED):
            raise BadRequest(f"seed {self.seed}: use a whole number of at most 63 bits")
        if 0.0 < self.temperature < 1e-3:
            raise BadRequest(f"temperature {self.temperature}: use 0 (greedy), or 0.001 and more")


GREEDY = Sampling()


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log of the model's probability of a token. best: the most likely tokens there, most
    likely first, as (id, log-probability)."""

    token: int
    logprob: float
    best: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Picks the tokens of one sequence.

    seen: the prompt's ids, for the repetition penalty; tokens that are picked join them. logprobs:
    how many of the most likely tokens to give beside the one picked; None gives no probabilities.
    """

    def __init__(
        self, sampling: Sampling = GREEDY, seen: Iterable[int] = (), logprobs: int | None = None
    ) -> None:
        if logprobs is not None and not (_is_int(logprobs) and logprobs >= 0):
            raise BadRequest(f"logprobs {logprobs}: use a whole number from 0")
        self.sampling = sampling
        self.logprobs = logprobs
        self._seen = array("i", seen if sampling.repetition_penalty != 1.0 else ())
        self._random = random.Random(sampling.seed)
        try:
            self._compiled = extension().sample
        except CannotRun:
            self._compiled = None

    @property
    def compiled(self) -> bool:
        """Whether cpp/sample.cpp picks; else torch does, with the same result."""
        return self._compiled is not None

    def pick(self, logits: Tensor) -> TokenLogprob:
        """The next token from logits fp32 [vocabulary], contiguous on the CPU. logprob is NaN where
        none was asked for. CannotRun where a logit is NaN or infinite."""
        uniform = self._random.random() if self.sampling.temperature > 0 else 0.0
        top = -1 if self.logprobs is None else self.logprobs
        if self._compiled is None:
            picked = choose_by_torch(logits, self._seen, self.sampling, uniform, top)
        else:
            picked = self._pick_compiled(logits, uniform, top)
        if picked is None:
            raise CannotRun(NOT_FINITE)
        if self.sampling.repetition_penalty != 1.0:
            self._seen.append(picked.token)
        return picked

    def _pick_compiled(self, logits: Tensor, uniform: float, top: int) -> TokenLogprob | None:
        if logits.dtype != torch.float32 or logits.dim() != 1 or not logits.is_contiguous():
            raise BadRequest(f"logits are {logits.dtype} {list(logits.shape)}, wanted fp32 [V]")
        assert self._compiled is not None
        ask = self.sampling
        address, count = self._seen.buffer_info()
        finite, token, logprob, best = self._compiled(
            logits.data_ptr(), logits.numel(), address, count, ask.repetition_penalty,
            ask.temperature, ask.top_k, ask.top_p, ask.min_p, uniform, top,
        )  # fmt: skip
        if not finite:
            return None
        return TokenLogprob(token, logprob if top >= 0 else math.nan, tuple(best))


def choose_by_torch(
    logits: Tensor, seen: Iterable[int], sampling: Sampling, uniform: float, top: int
) -> TokenLogprob | None:
    """One choice in plain torch, in float64: what cpp/sample.cpp does. None where a logit is NaN
    or infinite. top -1 gives no log-probabilities."""
    raw = logits.double()
    if not bool(torch.isfinite(raw).all()):
        return None
    scores = _penalised(logits.float(), seen, sampling.repetition_penalty).double()
    if sampling.temperature == 0:
        token = int((scores == scores.max()).nonzero()[0])
    else:
        weights = torch.exp((scores - scores.max()) / sampling.temperature)
        running = torch.where(kept(scores, weights, sampling), weights, 0.0).cumsum(0)
        over = (running > uniform * running[-1]).nonzero()
        token = int(over[0])
    if top < 0:
        return TokenLogprob(token, math.nan)
    logprobs = raw.log_softmax(0)
    # A stable sort puts the lower id first where probabilities are equal.
    order = torch.sort(logprobs, descending=True, stable=True).indices[:top].tolist()
    best = tuple((index, float(logprobs[index])) for index in order)
    return TokenLogprob(token, float(logprobs[token]), best)


def kept(scores: Tensor, weights: Tensor, sampling: Sampling) -> Tensor:
    """Which tokens top-k, top-p and min-p leave: bool [V]. scores and weights float64 [V]."""
    keep = torch.ones_like(scores, dtype=torch.bool)
    if 0 < sampling.top_k < scores.numel():
        keep = scores >= scores.topk(sampling.top_k).values[-1]
    if sampling.top_p < 1:
        order = torch.sort(scores.masked_fill(~keep, -math.inf), descending=True).indices
        sizes = weights[order] * keep[order]
        inside = sizes.cumsum(0) - sizes < sampling.top_p * sizes.sum()
        inside[0] = True
        keep = keep & (scores >= scores[order[inside]].min())
    return keep & (weights >= sampling.min_p)


def _penalised(scores: Tensor, seen: Iterable[int], penalty: float) -> Tensor:
    ids = torch.tensor([index for index in set(seen) if index < scores.numel()], dtype=torch.long)
    if penalty == 1.0 or not len(ids):
        return scores
    found = scores[ids]
    return scores.index_put((ids,), torch.where(found < 0, found * penalty, found / penalty))
