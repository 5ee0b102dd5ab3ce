"""Choosing a token: the compiled sampler, the same in torch, and transformers' processors.

    python benchmarks/sampling.py [--rounds 15] [--write]

Logits of 49,152 and 151,936 tokens, a few likely ones over a broad floor (standard deviation 2 with
20 tokens raised by up to 10; "peaked" by up to 20, where the nucleus is a handful). In turns in one run on one thread, CPU time of
that thread. transformers has no log-probabilities here, and draws by torch.multinomial.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from common import finish
from weightpath.bench.timing import in_turns
from weightpath.engine.sampling import GREEDY, Sampler, Sampling, choose_by_torch

VOCABULARIES = (49_152, 151_936)
CASES: dict[str, tuple[Sampling, int | None]] = {
    "greedy": (GREEDY, None),
    "temperature 1": (Sampling(1.0, seed=0), None),
    "0.7, top-k 50": (Sampling(0.7, 50, seed=0), None),
    "0.7, top-k 50, top-p 0.95": (Sampling(0.7, 50, 0.95, seed=0), None),
    "0.7, top-p 0.95": (Sampling(0.7, 0, 0.95, seed=0), None),
    "0.7, top-p 0.95, peaked": (Sampling(0.7, 0, 0.95, seed=0), None),
    "0.7, min-p 0.05": (Sampling(0.7, 0, 1.0, 0.05, seed=0), None),
    "0.7, top-k 50, penalty 1.1": (Sampling(0.7, 50, 1.0, 0.0, 1.1, seed=0), None),
    "greedy, 5 log-probabilities": (GREEDY, 5),
}


def logits_of(vocabulary: int, seed: int, lift: float) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    made = torch.randn(vocabulary, generator=draw) * 2
    made[torch.randint(vocabulary, (20,), generator=draw)] += torch.rand(20, generator=draw) * lift
    return made


def by_transformers(logits: Tensor, seen: Tensor, ask: Sampling) -> int:
    scores = logits[None].clone()
    if ask.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(ask.repetition_penalty)(seen, scores)  # type: ignore[arg-type]
    if ask.temperature == 0:
        return int(scores.argmax())
    scores = TemperatureLogitsWarper(ask.temperature)(seen, scores)  # type: ignore[arg-type]
    if ask.top_k:
        scores = TopKLogitsWarper(ask.top_k)(seen, scores)  # type: ignore[arg-type]
    if ask.top_p < 1:
        scores = TopPLogitsWarper(ask.top_p)(seen, scores)  # type: ignore[arg-type]
    if ask.min_p:
        scores = MinPLogitsWarper(ask.min_p)(seen, scores)  # type: ignore[arg-type]
    return int(torch.multinomial(scores.softmax(-1), 1))


def over(logits: list[Tensor], call: Callable[[Tensor], Any]) -> Callable[[], None]:
    """The call on every one of the logits."""

    def run() -> None:
        for one in logits:
            call(one)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="keep the result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    print(f"{'vocabulary':>10}  {'settings':28}  {'compiled, us':>22}  {'torch':>8}  {'transformers':>12}")  # fmt: skip
    for vocabulary in VOCABULARIES:
        seen = torch.randint(vocabulary, (1, 500), generator=torch.Generator().manual_seed(9))
        ids = seen[0].tolist()
        for name, (ask, top) in CASES.items():
            lift = 20.0 if "peaked" in name else 10.0
            logits = [logits_of(vocabulary, seed, lift) for seed in range(8)]
            sampler = Sampler(ask, ids, top)
            assert sampler.compiled
            plain = -1 if top is None else top
            calls = {
                "compiled": over(logits, sampler.pick),
                "torch": over(logits, lambda x: choose_by_torch(x, ids, ask, 0.3, plain)),  # noqa: B023
                "transformers": over(logits, lambda x: by_transformers(x, seen, ask)),  # noqa: B023
            }
            times = in_turns(calls, options.rounds, minimum_seconds=0.002, clock=time.thread_time)
            found = {
                key: [1e6 * value / len(logits) for value in (t.median, t.low, t.high)]
                for key, t in times.items()
            }
            rows.append({"vocabulary": vocabulary, "settings": name, "microseconds": found})
            middle, low, high = found["compiled"]
            print(
                f"{vocabulary:>10}  {name:28}  {f'{middle:.1f} ({low:.1f} to {high:.1f})':>22}"
                f"  {found['torch'][0]:8.0f}  {found['transformers'][0]:12.0f}"
            )
    if options.write:
        finish("sampling", {"rows": rows})


if __name__ == "__main__":
    main()
