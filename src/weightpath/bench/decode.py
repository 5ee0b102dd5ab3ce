"""Decode and prefill speed of causal language models, in turns in one run, batch of one.

One sample of one model: a prompt of P tokens is read into an empty cache (prefill, P / seconds
tokens/s), then D tokens are read one by one, each the most likely after the last (decode,
D / seconds tokens/s; the prefill is not in it). What is timed is a session's steps on the engine
that the model was loaded with, and an argmax: no tokenizer, no sampling, no stop tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch

from weightpath.bench.timing import Ratio, Timing, ratio, sample_in_turns
from weightpath.engine.session import open_session
from weightpath.errors import BadRequest


@dataclass(frozen=True)
class ModelSpeed:
    """Speeds of one model in tokens/s, and their ratios to the first model's (None for it)."""

    name: str
    decode: Timing
    prefill: Timing
    decode_ratio: Ratio | None
    prefill_ratio: Ratio | None


@dataclass(frozen=True)
class SpeedResult:
    """Speeds of models measured in turns, the first being what the others are compared with."""

    models: tuple[ModelSpeed, ...]
    prompt_length: int
    decode_tokens: int
    rounds: int
    threads: int
    device: str

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, tuples and numbers, ready for JSON."""
        return asdict(self)


def measure_speed(
    models: dict[str, Any],
    prompt_length: int = 128,
    decode_tokens: int = 16,
    rounds: int = 3,
    budget_seconds: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> SpeedResult:
    """Measure models in turns; each is warmed up by a prompt and two steps first.

    All must be on one device. `budget_seconds` bounds the rounds, of which at least two run.
    `progress` is called with the name of the model about to be sampled.
    """
    if not models:
        raise BadRequest("speed: no models; give at least one")
    if prompt_length < 1 or decode_tokens < 1:
        raise BadRequest(
            f"speed: a prompt of {prompt_length} and {decode_tokens} decoded tokens; "
            "both must be at least 1"
        )
    devices = {str(model.device) for model in models.values()}
    if len(devices) > 1:
        raise BadRequest(f"speed: models are on {', '.join(sorted(devices))}; put them on one")
    for name, model in models.items():
        if model.training:
            raise BadRequest(f"speed: model {name} is in training mode; call its .eval()")

    def sampler(name: str, steps: int) -> Callable[[], tuple[float, float]]:
        model = models[name]
        prompt = _prompt(model, prompt_length)

        def sample() -> tuple[float, float]:
            if progress is not None:
                progress(name)
            return _sample(model, prompt, steps)

        return sample

    for name in models:
        sampler(name, 2)()
    samples = sample_in_turns(
        {name: sampler(name, decode_tokens) for name in models},
        rounds,
        budget_seconds=budget_seconds,
    )
    unit = "tokens/s"
    prefill = {n: Timing.of([prompt_length / s for s, _ in v], unit) for n, v in samples.items()}
    decode = {n: Timing.of([decode_tokens / s for _, s in v], unit) for n, v in samples.items()}
    first = next(iter(models))
    return SpeedResult(
        models=tuple(
            ModelSpeed(
                name,
                decode[name],
                prefill[name],
                None if name == first else ratio(decode[name], decode[first]),
                None if name == first else ratio(prefill[name], prefill[first]),
            )
            for name in models
        ),
        prompt_length=prompt_length,
        decode_tokens=decode_tokens,
        rounds=len(samples[first]),
        threads=torch.get_num_threads(),
        device=devices.pop(),
    )


def _prompt(model: Any, length: int) -> list[int]:
    """The same random tokens for every model of one vocabulary."""
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (length,), generator=generator).tolist()


def _sample(model: Any, prompt: list[int], steps: int) -> tuple[float, float]:
    """Seconds of one prefill and of `steps` decode steps after it. Logits come to the CPU, so a
    device has finished."""
    session = open_session(model, len(prompt) + steps)
    start = perf_counter()
    token = int(session.extend(prompt).argmax())
    middle = perf_counter()
    for _ in range(steps):
        token = int(session.extend([token]).argmax())
    return middle - start, perf_counter() - middle
