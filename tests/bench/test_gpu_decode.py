"""benchmarks/gpu_decode.py on small shapes: every row it prints, on whatever device is here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_decode.py"


def test_the_whole_benchmark_runs_on_a_tiny_shape_and_its_numbers_add_up(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "--tiny", "--batches", "1,3", "--context", "32",
         "--rounds", "2", "--layers", "1", "--json", str(out)],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    body = json.loads(out.read_text())
    assert body["kind"] == "gpu-decode"
    assert json.loads(ran.stdout.splitlines()[-1]) == body
    assert [(row["batch"], row["weights"]) for row in body["rows"]] == [
        (batch, kind) for batch in (1, 3) for kind in ("bf16", "int8", "w4")
    ]
    hidden, inner, vocabulary, q_and_out, kv = 256, 512, 512, 2 * 256 * 256, 2 * 128 * 256
    linears = q_and_out + kv + 3 * hidden * inner
    bf16, int8, w4 = (row["bytes"]["weights"] for row in body["rows"][:3])
    assert bf16 == 2 * (linears + hidden * vocabulary)
    channels = 256 + 2 * 128 + 256 + 2 * inner + hidden + vocabulary
    assert int8 == linears + hidden * vocabulary + 4 * channels
    assert w4 == linears // 2 + linears // 128 * 2 + hidden * vocabulary + 4 * vocabulary
    for row in body["rows"]:
        assert row["ms"][1] <= row["ms"][0] <= row["ms"][2]
        assert row["of_limit"] == pytest.approx(row["limit_ms"] / row["ms"][0])
        assert row["products_ms"] > 0
        assert sum(one["us"] for one in row["profile"]) > 0
        assert f"batch {row['batch']:3} {row['weights']:12}" in ran.stdout
