"""Greedy answers reproduced exactly: k of n prompts, and how far the others got.

The reference writes a greedy continuation c[1..m] of every prompt. The candidate would write the
same text if and only if, reading prompt + c, its most likely next token is c[i] at every i: up to
the first difference both have read the same prefix, so one pass over prompt + c finds the first
divergence exactly, at the price of a prefill. (Up to rounding: one pass over many positions and
single steps with a cache add in different orders, which can flip near ties. The reference is
therefore read the same way, and its own k of n is the noise floor of this measure.) The reference
writes all its texts in one batch.

Greedy here is the argmax of the model's own logits: penalties and sampling that a checkpoint's
generation settings ask for are left out for both, and only its stop tokens are kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from weightpath.engine.generate import encode, stop_ids
from weightpath.errors import BadRequest
from weightpath.fidelity.logits import Progress, window_logits
from weightpath.fidelity.metrics import Interval, wilson

MINIMUM_PROMPTS = 12
METHODS = ("teacher-forced", "generate")


@dataclass(frozen=True)
class Prompt:
    name: str
    prompt: str


@dataclass(frozen=True)
class GreedyPrompt:
    """One prompt's outcome. Lengths in new tokens, the stop token included.

    `agreed` tokens are common to both; the first difference, if any, is the one after them.
    `diverged` false means that the texts are equal, and `agreed` is the length tried (censored).
    `candidate_text` ends with the first differing token where the method was teacher-forced.
    `reference_agreed` is the same count for the reference read back in one pass.
    """

    name: str
    prompt: str
    length: int
    agreed: int
    diverged: bool
    reference_text: str
    candidate_text: str
    reference_agreed: int


@dataclass(frozen=True)
class GreedyResult:
    """k of n greedy texts exactly equal, with Wilson intervals.

    `equal` is the candidate's share and `equal_reference` the reference's own (noise floor).
    `survival` holds (tokens, share of prompts not yet diverged after them), by Kaplan and Meier.
    """

    method: str
    max_new_tokens: int
    k: int
    n: int
    equal: Interval
    equal_reference: Interval
    survival: tuple[tuple[int, float], ...]
    prompts: tuple[GreedyPrompt, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, tuples and numbers, ready for JSON."""
        return asdict(self)


def read_prompts(path: str | Path | None = None) -> list[Prompt]:
    """The project's own prompts, or those of a JSON file: a list of {"name", "prompt"}."""
    source = files("weightpath.fidelity").joinpath("prompts.json") if path is None else Path(path)
    try:
        return [Prompt(**entry) for entry in json.loads(source.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as problem:
        raise BadRequest(
            f'prompts {source}: {problem}; give a JSON list of {{"name": ..., "prompt": ...}}'
        ) from None


def greedy_agreement(
    reference: Any,
    candidate: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt] | None = None,
    max_new_tokens: int = 48,
    method: str = "teacher-forced",
    progress: Progress | None = None,
) -> GreedyResult:
    """How many greedy texts the candidate reproduces token for token.

    Models are causal language models of transformers in eval mode, or have a native engine beside
    them, which then runs. The chat template applies
    where the tokenizer has one. Method "generate" has the candidate write its own text step by
    step instead: slow on a slow kernel, and the check on the other method. BadRequest for fewer
    than MINIMUM_PROMPTS prompts, of which no interval would say anything.
    """
    prompts = read_prompts() if prompts is None else list(prompts)
    if len(prompts) < MINIMUM_PROMPTS:
        raise BadRequest(f"{len(prompts)} prompts; k of n needs at least {MINIMUM_PROMPTS}")
    if max_new_tokens < 1:
        raise BadRequest(f"{max_new_tokens} new tokens; greedy texts need at least 1")
    if method not in METHODS:
        raise BadRequest(f"greedy method '{method}'; use one of {', '.join(METHODS)}")
    follow = _read_back if method == "teacher-forced" else _write
    tokens = [prompt_tokens(tokenizer, prompt.prompt) for prompt in prompts]
    texts = greedy_batch(reference, tokenizer, tokens, max_new_tokens)
    rows = []
    for number, (prompt, ids, text) in enumerate(zip(prompts, tokens, texts, strict=True)):
        rows.append(
            _one(reference, candidate, tokenizer, prompt, ids, text, max_new_tokens, follow)
        )
        if progress is not None:
            progress(number + 1, len(prompts))
    n = len(rows)
    k = sum(not row.diverged for row in rows)
    own = sum(row.reference_agreed == row.length for row in rows)
    return GreedyResult(
        method=method,
        max_new_tokens=max_new_tokens,
        k=k,
        n=n,
        equal=wilson(k, n),
        equal_reference=wilson(own, n),
        survival=survival([(row.agreed, row.diverged) for row in rows]),
        prompts=tuple(rows),
    )


def survival(lengths: Sequence[tuple[int, bool]]) -> tuple[tuple[int, float], ...]:
    """Kaplan-Meier curve from (tokens agreed, diverged then): (tokens, share still equal).

    A text that never diverged counts as at risk up to its length and is censored there. A point
    (t, s): s of the texts agree on more than t tokens. The first point is (0, ..).
    """
    curve, share = [], 1.0
    for t in sorted({0, *(length for length, diverged in lengths if diverged)}):
        at_risk = sum(length >= t for length, _ in lengths)
        events = sum(diverged and length == t for length, diverged in lengths)
        share *= 1 - events / at_risk
        curve.append((t, share))
    return tuple(curve)


def prompt_tokens(tokenizer: Any, prompt: str) -> Tensor:
    """Tokens int64 [L] of a prompt: as a chat turn where the tokenizer has a template, else raw."""
    return encode(tokenizer, [{"role": "user", "content": prompt}])[0]


def greedy_tokens(model: Any, tokenizer: Any, ids: Tensor, max_new_tokens: int) -> Tensor:
    """Greedy continuation of ids [L]: int64 [m], m <= max_new_tokens, the stop token included."""
    return greedy_batch(model, tokenizer, [ids], max_new_tokens)[0]


def greedy_batch(
    model: Any, tokenizer: Any, prompts: Sequence[Tensor], max_new_tokens: int
) -> list[Tensor]:
    """`greedy_tokens` of several prompts in one batch, padded on the left.

    A step reads the weights once for all of them, so n texts cost little more than one.
    """
    longest = max(len(ids) for ids in prompts)
    with _only_stop_tokens(model, tokenizer) as (stops, pad):
        batch = torch.full((len(prompts), longest), pad)
        mask = torch.zeros_like(batch)
        for row, ids in enumerate(prompts):
            batch[row, longest - len(ids) :] = ids
            mask[row, longest - len(ids) :] = 1
        out = model.generate(
            batch.to(model.device),
            attention_mask=mask.to(model.device),
            do_sample=False,
            max_new_tokens=max_new_tokens,
        )
    return [_until_stop(row, stops) for row in out[:, longest:].cpu()]


def _until_stop(tokens: Tensor, stops: Sequence[int]) -> Tensor:
    """Tokens up to and with the first stop token; what follows it is padding."""
    ends = torch.isin(tokens, torch.tensor(stops, dtype=tokens.dtype)).nonzero()
    return tokens[: int(ends[0, 0]) + 1] if len(ends) else tokens


def _one(
    reference: Any,
    candidate: Any,
    tokenizer: Any,
    prompt: Prompt,
    ids: Tensor,
    written: Tensor,
    max_new_tokens: int,
    follow: Callable[[Any, Any, Tensor, Tensor, int], Tensor],
) -> GreedyPrompt:
    read = _read_back(reference, tokenizer, ids, written, max_new_tokens)
    theirs = follow(candidate, tokenizer, ids, written, max_new_tokens)
    agreed = _common(written, theirs)
    diverged = agreed < len(written)
    kept = theirs if follow is _write else theirs[: agreed + diverged]
    return GreedyPrompt(
        name=prompt.name,
        prompt=prompt.prompt,
        length=len(written),
        agreed=agreed,
        diverged=diverged,
        reference_text=tokenizer.decode(written),
        candidate_text=tokenizer.decode(kept),
        reference_agreed=_common(written, read),
    )


def _read_back(model: Any, tokenizer: Any, ids: Tensor, written: Tensor, limit: int) -> Tensor:
    """The model's own choice [m] at every place of a continuation [m] that it is made to read."""
    logits = window_logits(model, torch.cat([ids, written[:-1]]))
    return logits[len(ids) - 1 :].argmax(-1).cpu()


def _write(model: Any, tokenizer: Any, ids: Tensor, written: Tensor, limit: int) -> Tensor:
    """The model's own continuation, whatever the reference has written."""
    return greedy_tokens(model, tokenizer, ids, limit)


def _common(first: Tensor, second: Tensor) -> int:
    """Tokens in common from the start."""
    shared = min(len(first), len(second))
    different = (first[:shared] != second[:shared]).nonzero()
    return int(different[0, 0]) if len(different) else shared


@contextmanager
def _only_stop_tokens(model: Any, tokenizer: Any) -> Iterator[tuple[list[int], int]]:
    """Generation settings reduced to the stop tokens while the body runs, then restored.

    Yields the stop tokens and the token to pad with (0 where nothing names one).
    """
    before = model.generation_config
    stops = stop_ids(model, tokenizer)
    pad = before.pad_token_id if before.pad_token_id is not None else next(iter(stops), 0)
    model.generation_config = GenerationConfig(eos_token_id=stops or None, pad_token_id=pad)
    try:
        yield stops, pad
    finally:
        model.generation_config = before
