"""What int8 and 16-bit activations cost in fidelity, per row and per group, by weight scheme.

    python benchmarks/activation_cost.py [--models pycode demo] [--windows 6]

Weights stay the same within a scheme; only how the compiled kernels take activations changes. Two
comparisons of logits in fp32, on the evaluation text: with the model's own bf16 weights (what a user
loses in all), and with the same low-bit weights on float activations in plain torch (what the
activations alone lose). The last rows of a scheme compute in bf16, torch's floats beside ours.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from common import finish, shared
from fidelity_table import MODELS
from weightpath.checkpoints.locate import open_model
from weightpath.engine.load import load, load_float, load_tokenizer
from weightpath.fidelity.logits import compare
from weightpath.fidelity.metrics import summarize
from weightpath.fidelity.text import read_documents, windows
from weightpath.jobs.plan import plan_scheme
from weightpath.jobs.quantize import Recipe, quantize_checkpoint
from weightpath.nn.swap import low_bit_linears
from weightpath.scheme import Scheme
from weightpath.version import __version__

SCHEMES = ("w4g64", "w4g64-asym", "w4g32", "int8")
TAKEN = (
    ("float, torch", torch.float32, "torch", 16, False),
    ("16-bit a row", torch.float32, "cpu", 16, False),
    ("16-bit a group", torch.float32, "cpu", 16, True),
    ("8-bit a row", torch.float32, "cpu", 8, False),
    ("8-bit a group", torch.float32, "cpu", 8, True),
    ("bf16, torch", torch.bfloat16, "torch", 16, False),
    ("bf16, 16-bit a row", torch.bfloat16, "cpu", 16, False),
)
"""How activations are taken: a name, the arithmetic between linears, kernel, bits, scale a group."""


def rows(name: str, limit: int) -> Iterator[dict[str, Any]]:
    """One row a scheme and way of taking activations."""
    model, text = MODELS[name]
    checkpoint = open_model(model())
    documents, _ = read_documents(shared(text))
    cut = windows(load_tokenizer(Path(checkpoint.where)), documents, 512, limit, contiguous=True)
    own = load_float(checkpoint, torch.bfloat16, torch.float32)
    for scheme_name in SCHEMES:
        scheme = Scheme.parse(scheme_name)
        plan = plan_scheme(name, checkpoint, scheme, head_bits=16)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "out"
            quantize_checkpoint(checkpoint, plan.tensors, folder, Recipe(name, __version__))
            exact = load(folder, dtype=torch.float32, backend="torch", activation_bits=16)
            for taken, dtype, backend, bits, per_group in TAKEN:
                if scheme.bits == 8 and (bits == 8 or per_group):
                    continue  # int8 modules keep 16-bit activations, and have one group a row
                low = load(folder, dtype=dtype, backend=backend, activation_bits=bits)
                for _, module in low_bit_linears(low):
                    module.scale_per_group = per_group
                yield {
                    "model": name,
                    "scheme": scheme_name,
                    "activations": taken,
                    "all": summarize(compare(own, low, cut)).to_dict(),
                    "activations_alone": summarize(compare(exact, low, cut)).to_dict(),
                }


def show(row: dict[str, Any]) -> str:
    """A Markdown table's line."""
    whole, alone = row["all"], row["activations_alone"]
    mean, low, high = (whole["mean_kl"][key] for key in ("value", "low", "high"))
    return (
        f"| {row['model']} | {row['scheme']} | {row['activations']} "
        f"| {mean:.4f} ({low:.4f} to {high:.4f}) | {100 * whole['top1']['value']:.1f}% "
        f"| {alone['mean_kl']['value']:.2e} | {100 * alone['top1']['value']:.1f}% |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--windows", type=int, default=6)
    options = parser.parse_args()
    print("| model | weights | activations | KLD to bf16 (95%) | top-1 | KLD alone | top-1 alone |")
    print("|---|---|---|---|---|---|---|")
    found = []
    for name in options.models:
        for row in rows(name, options.windows):
            print(show(row), flush=True)
            for part in ("all", "activations_alone"):
                for key in ("kl_curve", "by_confidence"):
                    row[part].pop(key, None)
            found.append(row)
    finish("activation-cost", {"windows": options.windows, "rows": found})


if __name__ == "__main__":
    main()
