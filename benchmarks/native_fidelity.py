"""The native engine against transformers' modules on the same low-bit weights.

    python benchmarks/native_fidelity.py [--models demo pycode] [--tokens 4096] [--write]

Each model is quantized to w4g64 with an int8 head. The reference is transformers' modules on these
integers, in fp32 arithmetic, activations not rounded (backend "torch"). The native engine loads the
folder as `run` does. Text: the evaluation split, in windows of 512 tokens in a row.

KL divergence  of each way to run: 16-bit activations with keys and values in fp32, bf16 and int8;
               8-bit activations; transformers' modules in bf16, for what the same folder loses
               without this engine. BAR is for 16-bit activations with bf16 keys and values.
greedy text    PROMPTS prompts of LENGTH tokens, written token by token. Up to where a text parts
               from the reference's both have read the same. margin: the reference's logit of its
               own token less that of the other's token, there. noise: the largest change of the
               margin between the reference's two best tokens at all places before partings. A
               parting is a tie where margin <= noise: what this way to run changes elsewhere, where
               nothing parted, is enough to turn it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
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
MODELS: dict[str, tuple[Callable[[], Path], str]] = {
    "demo": (fetch_demo, "data/wikitext2-test.txt"),
    "pycode": (lambda: shared("models/pycode-42m"), "data/code-test.txt"),
}
WAYS: dict[str, dict[str, Any]] = {
    "native, a16, kv fp32": {"engine": "native", "activation_bits": 16, "kv_cache": "fp32"},
    "native, a16, kv bf16": {"engine": "native", "activation_bits": 16, "kv_cache": "bf16"},
    "native, a16, kv int8": {"engine": "native", "activation_bits": 16, "kv_cache": "int8"},
    "native, a8, kv bf16": {"engine": "native", "activation_bits": 8, "kv_cache": "bf16"},
    "transformers bf16, a16": {"engine": "transformers", "activation_bits": 16},
}

Text = tuple[list[int], Tensor]
"""Greedy tokens, and the logits fp32 [LENGTH, V] that each was picked from."""


@dataclass(frozen=True)
class Parting:
    """Where a greedy text leaves the reference's after `agreed` tokens. In logits: margin, and the
    change of the margin and of any token's logit there."""

    prompt: str
    agreed: int
    margin: float
    change: float
    largest: float


def written(model: Any, ids: list[int]) -> Text:
    """LENGTH greedy tokens after a prompt."""
    session, tokens, rows = open_session(model, len(ids) + LENGTH), [], []
    logits = session.extend(ids)
    while True:
        rows.append(logits.clone())
        tokens.append(int(rows[-1].argmax()))
        if len(tokens) == LENGTH:
            return tokens, torch.stack(rows)
        logits = session.extend(tokens[-1:])


def parting(name: str, first: Text, other: Text) -> Parting | None:
    """The first difference of two texts, or None where they are equal."""
    at = agreed(first, other)
    if at == LENGTH:
        return None
    mine, theirs = first[0][at], other[0][at]
    wanted, found = first[1][at], other[1][at]
    margin = float(wanted[mine] - wanted[theirs])
    change = abs(margin - float(found[mine] - found[theirs]))
    return Parting(name, at, margin, change, float((wanted - found).abs().max()))


def agreed(first: Text, other: Text) -> int:
    """Tokens in common from the start."""
    return next((i for i in range(LENGTH) if first[0][i] != other[0][i]), LENGTH)


def changes(first: Text, other: Text) -> Tensor:
    """How much the margin between the reference's two best changed at every agreed place: [A]."""
    count = agreed(first, other)
    wanted, found = first[1][:count], other[1][:count]
    best = wanted.topk(2, dim=-1).indices
    return (wanted.gather(1, best).diff(dim=1) - found.gather(1, best).diff(dim=1))[:, 0].abs()


def measure(folder: Path, text: Path, tokens: int) -> list[dict[str, Any]]:
    """A row for each of WAYS."""
    tokenizer = load_tokenizer(folder)
    documents, _ = read_documents(text)
    cut = windows(tokenizer, documents, WINDOW, tokens // WINDOW, contiguous=True)
    prompts = read_prompts()[:PROMPTS]
    ids = [prompt_tokens(tokenizer, prompt.prompt).tolist() for prompt in prompts]
    reference = load(folder, dtype=torch.float32, backend="torch", activation_bits=16)
    texts = [written(reference, one) for one in ids]
    rows = []
    for name, way in WAYS.items():
        model = load(folder, **way)
        found = summarize(compare(reference, model, cut))
        theirs = [written(model, one) for one in ids]
        both = list(zip(texts, theirs, strict=True))
        noise = float(torch.cat([changes(*pair) for pair in both]).max())
        named = zip(prompts, both, strict=True)
        parted = [parting(prompt.name, *pair) for prompt, pair in named]
        partings = [one for one in parted if one is not None]
        row = {
            "way": name,
            "tokens": found.tokens,
            "mean_kl": asdict(found.mean_kl),
            "p999_kl": found.p999_kl.value,
            "top1": found.top1.value,
            "perplexity": found.perplexity_candidate.value,
            "perplexity_reference": found.perplexity_reference.value,
            "under_bar": found.mean_kl.high <= BAR,
            "greedy": {
                "equal": PROMPTS - len(partings),
                "equal_for_32": PROMPTS - sum(one.agreed < 32 for one in partings),
                "prompts": PROMPTS,
                "length": LENGTH,
                "noise": noise,
                "partings": [{**asdict(one), "tie": one.margin <= noise} for one in partings],
            },
        }
        rows.append(row)
        show(row)
    return rows


def show(row: dict[str, Any]) -> None:
    """A Markdown table's line, and one for every parting."""
    kl, greedy = row["mean_kl"], row["greedy"]
    print(
        f"| {row['way']} | {kl['value']:.1e} ({kl['low']:.1e} to {kl['high']:.1e}) "
        f"| {row['p999_kl']:.1e} | {100 * row['top1']:.2f}% | {row['perplexity']:.3f} "
        f"| {greedy['equal']} of {greedy['prompts']} | {greedy['noise']:.3f} |",
        flush=True,
    )
    for one in greedy["partings"]:
        print(
            f"    {one['prompt']}: equal for {one['agreed']}, margin {one['margin']:.4f}, changed by "
            f"{one['change']:.4f}: {'a tie' if one['tie'] else 'no tie'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--write", action="store_true", help="keep the result")
    options = parser.parse_args()
    found = {}
    for name in options.models:
        source, text = MODELS[name]
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "low"
            weightpath.quantize(source(), folder, "w4g64", head_bits=8, search=False)
            print(f"{name}\n| way | KLD mean (95%) | 99.9% | top-1 | perplexity | greedy equal | noise |")  # fmt: skip
            print("|---|---|---|---|---|---|---|")
            found[name] = measure(folder, shared(text), options.tokens)
    if options.write:
        finish("native-fidelity", {"bar": BAR, "window": WINDOW, "models": found})


if __name__ == "__main__":
    main()
