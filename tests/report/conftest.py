"""A full set of report data, made by the rooms that make it in earnest."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from weightpath.bench.decode import ModelSpeed, SpeedResult
from weightpath.bench.timing import Timing, ratio
from weightpath.device.profile import Accelerator, HardwareProfile
from weightpath.fidelity.greedy import GreedyPrompt, GreedyResult, survival
from weightpath.fidelity.logits import TokenScores
from weightpath.fidelity.metrics import summarize, wilson


def summary_of(scale: float, comparison: str) -> dict:
    rng = np.random.default_rng(0)
    scores = TokenScores(
        comparison=comparison,
        kl=scale * rng.exponential(0.1, 1000),
        same_top=rng.random(1000) < 0.9,
        nll_reference=rng.exponential(2, 1000),
        nll_candidate=rng.exponential(2, 1000),
        top_probability=rng.random(1000),
        window=np.arange(1000) // 50,
        document=np.arange(1000) // 50,
    )
    return summarize(scores, resamples=50).to_dict()


@pytest.fixture
def data() -> dict:
    rows = (
        GreedyPrompt("a", "Say one.", 4, 4, False, "one", "one", 4),
        GreedyPrompt("b", "Say two.", 4, 2, True, "two three", "two four", 4),
    )
    greedy = GreedyResult(
        "teacher-forced", 4, 1, 2, wilson(1, 2), wilson(2, 2),
        survival([(4, False), (2, True)]), rows,
    )  # fmt: skip
    unit = "tokens/s"
    base, low = Timing.of([10.0, 10.5], unit), Timing.of([25.0, 20.0], unit)
    near = Timing.of([9.0, 11.0], unit)
    speed = SpeedResult(
        (
            ModelSpeed("bf16", base, base, None, None),
            ModelSpeed("w4g64", low, near, ratio(low, base), ratio(near, base)),
        ),
        128, 16, 2, 2, "cpu",
    )  # fmt: skip
    profile = HardwareProfile(
        arch="x86_64",
        cpu_model="Some Processor",
        cpu_flags=frozenset({"avx2", "fma"}),
        logical_cores=2,
        ram_total=8_000_000_000,
        accelerators=(Accelerator("npu", "acme", "Acme NPU", False, "no runtime"),),
        sources={"cpu_model": "/proc/cpuinfo"},
    )
    return {
        "model": "demo",
        "scheme": "w4g64",
        "version": "0.1.0",
        "command": "weightpath build demo",
        "base_model": "someone/some-model",
        "license": "apache-2.0",
        "device": dataclasses.asdict(profile),
        "plan": {
            "chosen": "w4a16-here",
            "reasons": ["the first reason"],
            "rejected": [{"name": "w4a8-there", "reason": "no such unit"}],
            "tensors": [
                {"what": "linears", "scheme": "w4g64", "count": 210, "reason": "64 divides 576"}
            ],
        },
        "written": {
            "folder": "somewhere/deep/demo-w4g64",
            "tensors": 482,
            "bytes": 98_765_432,
            "linear_bits_per_weight": 4.25,
            "file_bits_per_weight": 5.123,
            "by_scheme": {"w4g64": 210, "int8": 1},
        },
        "fidelity": {
            "text": "text.txt: 20 documents",
            "summary": summary_of(1, "candidate against reference"),
            "noise_floor": summary_of(1e-6, "reference at 2 threads against itself at 1 thread"),
            "greedy": greedy.to_dict(),
        },
        "speed": speed.to_dict(),
        "answer": {"prompt": "Why?", "text": "Because."},
    }
