"""Fidelity by scheme: int8 and 4-bit groups, symmetric and not, searched and min-max.

The linears are quantized, the head stays 16-bit; the text is the evaluation split, 12 windows of
512 tokens in a row, arithmetic in fp32, the reference being the model's own bf16 weights. Every
candidate goes through a checkpoint on disk, as a user's does.

    python benchmarks/fidelity_table.py [--models pycode demo] [--windows 12]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from common import finish, shared
from weightpath.checkpoints.locate import open_model
from weightpath.checkpoints.store import Checkpoint
from weightpath.engine.load import load, load_float, load_tokenizer
from weightpath.errors import BadRequest
from weightpath.fidelity.logits import compare, noise_floor
from weightpath.fidelity.metrics import summarize
from weightpath.fidelity.text import read_documents, windows
from weightpath.jobs.inspect import inspect_folder
from weightpath.jobs.plan import plan_scheme
from weightpath.jobs.quantize import Recipe, quantize_checkpoint
from weightpath.scheme import Scheme
from weightpath.version import __version__

MODELS = {
    "pycode": (lambda: str(shared("models/pycode-42m")), "data/code-test.txt"),
    "demo": (lambda: "demo", "data/wikitext2-test.txt"),
}
SCHEMES = ("int8", "w4g128", "w4g128-asym", "w4g64", "w4g64-asym", "w4g32", "w4g32-asym")


def rows(name: str, checkpoint: Checkpoint, text: Path, limit: int) -> Iterator[dict[str, Any]]:
    """One row a scheme, search and activation width; the first is the reference's own noise."""
    where = Path(checkpoint.where)
    tokenizer = load_tokenizer(where)
    documents, _ = read_documents(text)
    cut = windows(tokenizer, documents, 512, limit, contiguous=True)
    reference = load_float(checkpoint, torch.bfloat16, torch.float32)
    floor = summarize(noise_floor(reference, cut))
    yield {"model": name, "scheme": "noise floor", "summary": floor.to_dict()}
    for scheme_name in SCHEMES:
        scheme = Scheme.parse(scheme_name)
        try:
            plan = plan_scheme(name, checkpoint, scheme, head_bits=16)
        except BadRequest as reason:
            yield {"model": name, "scheme": scheme_name, "refused": str(reason)}
            continue
        for search in (True, False) if scheme.bits == 4 else (True,):
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch) / "out"
                recipe = Recipe(name, __version__, search=search)
                done = quantize_checkpoint(checkpoint, plan.tensors, folder, recipe)
                bits = inspect_folder(folder).linear_bits_per_weight
                for activations in (16, 8) if search and scheme.bits == 4 else (16,):
                    model = load(folder, dtype=torch.float32, activation_bits=activations)
                    summary = summarize(compare(reference, model, cut))
                    yield {
                        "model": name,
                        "scheme": scheme.with_activations(activations).name
                        if scheme.bits == 4
                        else "int8",
                        "range": "searched" if search else "min-max",
                        "linear_bits_per_weight": bits,
                        "signal_to_noise_db": done.total.signal_to_noise_db,
                        "summary": summary.to_dict(),
                    }


def show(row: dict[str, Any]) -> str:
    """A Markdown table's line."""
    if "refused" in row:
        return f"| {row['model']} | {row['scheme']} | | | does not apply: {row['refused']} | | | |"
    found = row["summary"]
    mean, median, worst = (found[key] for key in ("mean_kl", "median_kl", "p999_kl"))
    return (
        f"| {row['model']} | {row['scheme']} | {row.get('range', '')} | {row.get('linear_bits_per_weight', 0):.3f} "
        f"| {mean['value']:.4f} ({mean['low']:.4f} to {mean['high']:.4f}) | {median['value']:.4f} / {worst['value']:.2f} "
        f"| {100 * found['top1']['value']:.1f}% "
        f"| {found['perplexity_reference']['value']:.3f} -> {found['perplexity_candidate']['value']:.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--windows", type=int, default=12)
    options = parser.parse_args()
    print(
        "| model | scheme | range | bits/weight | KLD mean (95%) | median / 99.9% | top-1 | perplexity |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in options.models:
        model, text = MODELS[name]
        found = []
        for row in rows(name, open_model(model()), shared(text), options.windows):
            print(show(row), flush=True)
            for key in ("kl_curve", "by_confidence"):
                row.get("summary", {}).pop(key, None)
            found.append(row)
        finish(f"fidelity-{name}", {"windows": options.windows, "rows": found})


if __name__ == "__main__":
    main()
