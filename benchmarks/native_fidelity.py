"""The native engine against transformers' modules on the same low-bit weights.

    python benchmarks/native_fidelity.py [--folder FOLDER ...] [--tokens 4096] [--write]

For every folder (a low-bit checkpoint with a tokenizer; without one the demo model is quantized to
w4g64 with an int8 head) the reference is transformers' modules on the folder's own integers, in
fp32 arithmetic, activations not rounded (backend "torch"). The native engine loads the folder as
`run` does. Text: WikiText-2 test, windows of 512 tokens in a row.

KL divergence  of each way to run: 16-bit activations with keys and values in fp32, bf16 and int8,
               and 8-bit activations with bf16; and transformers' modules in bf16 beside them, which
               is what the same folder loses without this engine. BAR for the first three.
greedy text    PROMPTS prompts of LENGTH tokens, each written token by token. Up to where a native
               text parts from the reference's both have read the same, so their logits there are
               compared: the margin is the reference's best logit less that of the token that the
               native engine took, the change the largest difference between the two engines'
               logits for these two tokens, and a parting is a tie where margin <= 2 * change: so
               near were the two that rounding alone decides.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import weightpath
from common import finish, shared
from weightpath.checkpoints.demo import fetch_demo
from weightpath.engine.load import load, load_tokenizer
from weightpath.engine.session import open_session
from weightpath.fidelity.greedy import prompt_tokens, read_prompts
from weightpath.fidelity.logits import compare
from weightpath.fidelity.metrics import summarize
from weightpath.fidelity.text import read_documents, windows

BAR = 1e-3
WINDOW = 512
PROMPTS, LENGTH = 12, 48
WAYS: dict[str, dict[str, Any]] = {
    "native, a16, kv fp32": {"engine": "native", "activation_bits": 16, "kv_cache": "fp32"},
    "native, a16, kv bf16": {"engine": "native", "activation_bits": 16, "kv_cache": "bf16"},
    "native, a16, kv int8": {"engine": "native", "activation_bits": 16, "kv_cache": "int8"},
    "native, a8, kv bf16": {"engine": "native", "activation_bits": 8, "kv_cache": "bf16"},
    "transformers bf16, a16": {"engine": "transformers", "activation_bits": 16},
}


@dataclass(frozen=True)
class Parting:
    """Where a greedy text leaves the reference's. margin and change in logits, as above; largest:
    the change of any token's logit there."""

    prompt: str
    agreed: int
    margin: float
    change: float
    largest: float

    @property
    def tie(self) -> bool:
        return self.margin <= 2 * self.change


def written(model: Any, ids: list[int]) -> tuple[list[int], Tensor]:
    """LENGTH greedy tokens after a prompt, and the logits [LENGTH, V] that each was picked from."""
    session, tokens, rows = open_session(model, len(ids) + LENGTH), [], []
    logits = session.extend(ids)
    while True:
        rows.append(logits.clone())
        tokens.append(int(rows[-1].argmax()))
        if len(tokens) == LENGTH:
            return tokens, torch.stack(rows)
        logits = session.extend(tokens[-1:])


def parting(
    name: str, first: tuple[list[int], Tensor], other: tuple[list[int], Tensor]
) -> Parting | None:
    """The first difference of two texts, or None where they are equal."""
    at = next((i for i in range(LENGTH) if first[0][i] != other[0][i]), None)
    if at is None:
        return None
    both = [first[0][at], other[0][at]]
    wanted, found = first[1][at], other[1][at]
    return Parting(
        name,
        at,
        float(wanted[both[0]] - wanted[both[1]]),
        float((wanted - found)[both].abs().max()),
        float((wanted - found).abs().max()),
    )


def measure(folder: Path, tokens: int) -> list[dict[str, Any]]:
    """A row for each of WAYS."""
    tokenizer = load_tokenizer(folder)
    documents, _ = read_documents(shared("data/wikitext2-test.txt"))
    cut = windows(tokenizer, documents, WINDOW, tokens // WINDOW, contiguous=True)
    prompts = read_prompts()[:PROMPTS]
    ids = [prompt_tokens(tokenizer, prompt.prompt).tolist() for prompt in prompts]
    reference = load(folder, dtype=torch.float32, backend="torch", activation_bits=16)
    texts = [written(reference, one) for one in ids]
    rows = []
    for name, way in WAYS.items():
        model = load(folder, **way)
        found = summarize(compare(reference, model, cut))
        partings = [
            parted
            for prompt, one, text in zip(prompts, ids, texts, strict=True)
            if (parted := parting(prompt.name, text, written(model, one))) is not None
        ]
        row = {
            "way": name,
            "tokens": found.tokens,
            "mean_kl": asdict(found.mean_kl),
            "p999_kl": found.p999_kl.value,
            "top1": found.top1.value,
            "perplexity": found.perplexity_candidate.value,
            "perplexity_reference": found.perplexity_reference.value,
            "greedy_equal": PROMPTS - len(partings),
            "greedy_prompts": PROMPTS,
            "greedy_length": LENGTH,
            "partings": [{**asdict(one), "tie": one.tie} for one in partings],
        }
        if name.startswith("native, a16"):
            row["under_bar"] = found.mean_kl.high <= BAR
        rows.append(row)
        show(row)
    return rows


def show(row: dict[str, Any]) -> None:
    """A Markdown table's line, and one for every parting."""
    kl = row["mean_kl"]
    print(
        f"| {row['way']} | {kl['value']:.1e} ({kl['low']:.1e} to {kl['high']:.1e}) "
        f"| {row['p999_kl']:.1e} | {100 * row['top1']:.2f}% "
        f"| {row['greedy_equal']} of {row['greedy_prompts']} |",
        flush=True,
    )
    for one in row["partings"]:
        print(
            f"    {one['prompt']}: equal for {one['agreed']}, margin {one['margin']:.4f}, change "
            f"{one['change']:.4f} (largest {one['largest']:.4f}){', a tie' if one['tie'] else ''}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, nargs="*", default=[], help="low-bit checkpoints")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--write", action="store_true", help="keep the result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = options.folder
        if not folders:
            folders = [Path(scratch) / "demo-w4g64"]
            weightpath.quantize(fetch_demo(), folders[0], "w4g64", head_bits=8, search=False)
        found = {}
        for folder in folders:
            print(f"{folder.name}\n| way | KLD mean (95%) | 99.9% | top-1 | greedy equal |")
            print("|---|---|---|---|---|")
            found[folder.name] = measure(folder, options.tokens)
    if options.write:
        finish("native-fidelity", {"bar": BAR, "window": WINDOW, "models": found})


if __name__ == "__main__":
    main()
