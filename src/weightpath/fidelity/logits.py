"""Next-token distributions of two models on the same text, token by token.

For a window of tokens t[0..L-1] both models read the same prefix (teacher forcing), and for every
position i the prediction of t[i+1] is compared over the full vocabulary V:

    KL(i) = sum_v p(v) * (log p(v) - log q(v))      nats; p the reference's, q the candidate's
    nll   = -log p(t[i+1]),  -log q(t[i+1])         nats
    same_top = argmax p == argmax q

Logits [L, V] are taken as the models emit them and worked on in float64, some positions at a
time: peak memory is the logits of one window from each model, plus about 5 * CHUNK_ELEMENTS * 8
bytes. In float64 the sum cannot round below -1e-12, and a model against itself gives exactly 0.
Log-probabilities are never stored in less: a 16-bit store alone costs a KLD of 5.5e-4 (measured
on llama.cpp's uint16 form). A model that computes in bf16 also rounds its logits to 8 bits of
mantissa; that is part of the model, and the noise floor shows what it does.

A model that `load` put a native engine beside (`model.weightpath.native`) is measured on that
engine, since it is what `generate` and sessions run; any other through its own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weightpath.errors import BadRequest, BadTensor
from weightpath.fidelity.text import Window

CHUNK_ELEMENTS = 1 << 20
"""Logits worked on at a time. Larger chunks were slower on a 2-core CPU (out of cache)."""

Progress = Callable[[int, int], None]
"""Called after every window with (windows done, windows in all)."""


@dataclass(frozen=True)
class TokenScores:
    """One value per predicted token, arrays [T]; kl and nll in nats.

    `window` and `document` are indices; `document` is NO_DOCUMENT (-1) for a contiguous cut.
    `comparison` says in words what was compared with what.
    """

    comparison: str
    kl: np.ndarray  # float64
    same_top: np.ndarray  # bool
    nll_reference: np.ndarray  # float64
    nll_candidate: np.ndarray  # float64
    top_probability: np.ndarray  # float64, the reference's largest probability
    window: np.ndarray  # int64
    document: np.ndarray  # int64


def compare(
    reference: Any, candidate: Any, windows: Sequence[Window], progress: Progress | None = None
) -> TokenScores:
    """Score a candidate against a reference, one window at a time in batches of one.

    Both are causal language models of transformers in eval mode, with one vocabulary; they may
    sit on different devices. BadRequest where they cannot be compared, BadTensor naming the
    window and position where logits are NaN or infinite.
    """
    for name, model in (("reference", reference), ("candidate", candidate)):
        _check(name, model, windows)
    return _score(
        "candidate against reference",
        lambda tokens: window_logits(reference, tokens),
        lambda tokens: window_logits(candidate, tokens),
        windows,
        progress,
    )


def noise_floor(
    reference: Any,
    windows: Sequence[Window],
    threads: int | None = None,
    copies: int | None = None,
    progress: Progress | None = None,
) -> TokenScores:
    """The reference against itself where only the order of its sums can differ.

    It runs again at `threads` threads (the count is restored), or with every window `copies`
    times in a batch. Where neither is given: on a CPU another thread count (1, or 2 where it runs
    at 1 now); on an accelerator, where threads change nothing, 2 copies. A candidate below this
    floor cannot be told from the reference; exactly 0 says that the sums kept their order.
    """
    _check("reference", reference, windows)
    before = torch.get_num_threads()
    if threads is None and copies is None:
        if reference.device.type == "cpu":
            threads = 1 if before > 1 else 2
        else:
            copies = 2
    if (threads is None) == (copies is None):
        raise BadRequest("noise floor: give a thread count or a number of copies, not both")
    if threads is not None and (threads < 1 or threads == before):
        raise BadRequest(
            f"noise floor at {threads} threads against {before}; give another count, 1 or more"
        )
    if copies is not None and copies < 2:
        raise BadRequest(f"noise floor with {copies} copies against 1; give 2 or more")

    def again(tokens: Tensor) -> Tensor:
        torch.set_num_threads(threads or before)
        try:
            return window_logits(reference, tokens, copies or 1)
        finally:
            torch.set_num_threads(before)

    return _score(
        f"reference in batches of 1 against itself in batches of {copies}"
        if copies
        else f"reference on {_threads(before)} against itself on {_threads(threads or before)}",
        lambda tokens: window_logits(reference, tokens),
        again,
        windows,
        progress,
    )


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _check(name: str, model: Any, windows: Sequence[Window]) -> None:
    if model.training:
        raise BadRequest(f"{name} model is in training mode (dropout may be on); call its .eval()")
    if not windows:
        raise BadRequest("0 windows to compare on; give a text of at least one window")
    vocabulary = model.config.get_text_config().vocab_size
    largest = max(int(window.tokens.max()) for window in windows)
    if largest >= vocabulary:
        raise BadRequest(
            f"{name} model has {vocabulary} tokens and the text holds token {largest}; "
            "cut the windows with the tokenizer that belongs to the model"
        )


@torch.inference_mode()
def window_logits(model: Any, tokens: Tensor, copies: int = 1) -> Tensor:
    """Logits [L, V] after each of tokens int64 [L]: fp32 on the CPU from a native engine, else on
    the model's device in its own type. copies: rows of the batch, of transformers' alone."""
    native: Any = getattr(getattr(model, "weightpath", None), "native", None)
    if native is not None and copies == 1:
        return native.session(len(tokens)).all_logits(tokens.tolist())
    batch = tokens.to(model.device).expand(copies, -1)
    return model(input_ids=batch, use_cache=False).logits[-1]


@torch.inference_mode()
def _score(
    comparison: str,
    reference: Callable[[Tensor], Tensor],
    candidate: Callable[[Tensor], Tensor],
    windows: Sequence[Window],
    progress: Progress | None,
) -> TokenScores:
    parts: list[np.ndarray] = []
    for number, window in enumerate(windows):
        first = reference(window.tokens)[:-1]
        second = candidate(window.tokens)[:-1].to(first.device)
        if first.shape != second.shape:
            raise BadRequest(
                f"reference logits have shape {list(first.shape)}, the candidate's "
                f"{list(second.shape)}; compare two forms of one model"
            )
        following = window.tokens[1:].to(first.device)
        parts.append(_score_window(first, second, following, number))
        if progress is not None:
            progress(number + 1, len(windows))
    columns = np.concatenate(parts, axis=1)
    lengths = [len(window.tokens) - 1 for window in windows]
    return TokenScores(
        comparison=comparison,
        kl=columns[0],
        same_top=columns[1].astype(bool),
        nll_reference=columns[2],
        nll_candidate=columns[3],
        top_probability=columns[4],
        window=np.repeat(np.arange(len(windows)), lengths),
        document=np.repeat([window.document for window in windows], lengths),
    )


def _score_window(first: Tensor, second: Tensor, following: Tensor, number: int) -> np.ndarray:
    """Rows kl, same_top, nll_reference, nll_candidate, top_probability: float64 [5, L-1]."""
    positions, vocabulary = first.shape
    rows = max(1, CHUNK_ELEMENTS // vocabulary)
    parts = []
    for start in range(0, positions, rows):
        cut = slice(start, start + rows)
        log_p = _log_probabilities(first[cut], "reference", number, start)
        log_q = _log_probabilities(second[cut], "candidate", number, start)
        p = log_p.exp()
        token = following[cut, None]
        parts.append(
            torch.stack(
                [
                    (p * (log_p - log_q)).sum(-1),
                    (first[cut].argmax(-1) == second[cut].argmax(-1)).double(),
                    -log_p.gather(1, token)[:, 0],
                    -log_q.gather(1, token)[:, 0],
                    p.amax(-1),
                ]
            )
        )
    return torch.cat(parts, dim=1).cpu().numpy()


def _log_probabilities(logits: Tensor, which: str, window: int, start: int) -> Tensor:
    """Log-softmax in float64 [C, V]; BadTensor where a logit is NaN or infinite."""
    finite = torch.isfinite(logits)
    if not bool(finite.all()):
        position, token = (~finite).nonzero()[0].tolist()
        raise BadTensor(
            f"{which} logits",
            f"window {window}, position {start + position}, token {token} is "
            f"{float(logits[position, token])}",
            "run the model in fp32 or bf16, or quantize it again and check its scales",
        )
    return torch.log_softmax(logits.double(), dim=-1)
