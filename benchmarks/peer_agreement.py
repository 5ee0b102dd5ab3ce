"""Whose logits are nearer to fp32 arithmetic on the same weights: ours, llama.cpp's, OpenVINO's.

    python benchmarks/peer_agreement.py --cache FOLDER [--threads 2] [--peers FOLDER]
                                        [--llama-server BINARY] [--write]

All run the demo model's w4g64 integers (decode_models.py). The reference is transformers' modules on
them in fp32, activations not rounded; it writes LENGTH greedy tokens after each prompt, and every
product reads them token by token on its cache, giving its logits at every place. So a product's own
greedy text would be the reference's up to the first place where its best token is another.

Prompts: PROMPTS of the greedy comparison, as chat turns; and RANDOM of 16 random ids, what
cpu_decode.py decodes from.

KL divergence   from the reference, mean over places, with the interval over prompts.
agreed          places before the first other choice, of LENGTH, median (lowest) over prompts.
partings        first other choices. margin: the reference's logit of its own token less that of the
                other's. noise: the largest change of the margin between the reference's two best at
                places before partings, over both sets. A parting is a tie where margin <= noise.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import REPOSITORY, finish
from decode_models import BenchModel, prepare
from peer_process import PeerProcess, absent, peer_python
from weightpath.engine.load import load, load_tokenizer
from weightpath.engine.session import open_session
from weightpath.fidelity.greedy import prompt_tokens, read_prompts

PROMPTS, RANDOM, RANDOM_LENGTH = 12, 8, 16
LENGTH = 16
CONTEXT = 512
EXACT = {
    "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
}  # fmt: skip
RESAMPLES = 1000

Logits = Callable[[list[int], int], Tensor]
"""(ids, first) -> fp32 [len(ids) - first, V] after ids[: i + 1], for i from first on."""


@dataclass(frozen=True)
class Case:
    """A prompt, the reference's text after it, and its logits [LENGTH, V] that each came from."""

    kind: str
    prompt: list[int]
    text: list[int]
    wanted: Tensor


@dataclass(frozen=True)
class Parting:
    """The first place where a product's choice is another, and the margin there, in logits."""

    kind: str
    agreed: int
    margin: float


def ours(folder: Path, **options: Any) -> Logits:
    """A folder's or GGUF file's logits, on what `load` with these options runs."""
    model = load(folder, **options)

    def run(ids: list[int], first: int) -> Tensor:
        session = open_session(model, CONTEXT)
        rows = [session.extend(ids[: first + 1]).clone()]
        rows += [session.extend([token]).clone() for token in ids[first + 1 :]]
        return torch.stack(rows)

    return run


@contextmanager
def peer(python: Path | str, script: str, load_request: dict[str, Any]) -> Iterator[Logits]:
    """A worker's logits. load_request: what it is asked first."""
    with PeerProcess(python, script) as worker, tempfile.TemporaryDirectory() as scratch:
        said = worker.ask(**load_request)
        if "settings" in said:
            print(f"{script}: {said['settings']}")
        file = Path(scratch) / "logits"

        def run(ids: list[int], first: int) -> Tensor:
            rows = worker.ask(do="logits", ids=ids, first=first, file=str(file))["rows"]
            return torch.from_numpy(np.fromfile(file, dtype=np.float32).reshape(rows, -1))

        yield run


def cases(model: BenchModel, reference: Any) -> list[Case]:
    """Both kinds of prompt, with the reference's greedy text."""
    tokenizer = load_tokenizer(model.folder)
    chats = [prompt_tokens(tokenizer, one.prompt).tolist() for one in read_prompts()[:PROMPTS]]
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocabulary, (RANDOM, RANDOM_LENGTH), generator=draw).tolist()
    found = []
    for kind, prompt in [*(("chat", one) for one in chats), *(("random", one) for one in ids)]:
        session, text, rows = open_session(reference, CONTEXT), [], []
        while len(text) < LENGTH:
            rows.append(session.extend(text[-1:] or prompt).clone())
            text.append(int(rows[-1].argmax()))
        found.append(Case(kind, prompt, text, torch.stack(rows)))
    return found


def measure(name: str, logits: Logits, all_cases: list[Case]) -> dict[str, Any]:
    """One product over all cases."""
    divergences: dict[str, list[float]] = {"chat": [], "random": []}
    lengths: dict[str, list[int]] = {"chat": [], "random": []}
    same: dict[str, list[float]] = {"chat": [], "random": []}
    partings, changes = [], []
    for case in all_cases:
        found = logits([*case.prompt, *case.text[:-1]], len(case.prompt) - 1)
        p, q = case.wanted.double().log_softmax(-1), found.double().log_softmax(-1)
        divergences[case.kind].append(float((p.exp() * (p - q)).sum(-1).mean()))
        chosen = found.argmax(-1).tolist()
        same[case.kind].append(statistics.mean(a == b for a, b in zip(chosen, case.text, strict=True)))  # fmt: skip
        agreed = next((i for i in range(LENGTH) if chosen[i] != case.text[i]), LENGTH)
        lengths[case.kind].append(agreed)
        best = p[:agreed].topk(2, dim=-1).indices
        margins = [one[:agreed].gather(1, best).diff(dim=1)[:, 0] for one in (p, q)]
        changes.append((margins[0] - margins[1]).abs())
        if agreed < LENGTH:
            row = p[agreed]
            margin = float(row[case.text[agreed]] - row[chosen[agreed]])
            partings.append(Parting(case.kind, agreed, margin))
    noise = float(torch.cat(changes).max())
    row = {"product": name, "noise": noise, "partings": [asdict(one) for one in partings]}
    for kind, values in divergences.items():
        of_kind = [one.margin for one in partings if one.kind == kind]
        row[kind] = {
            "mean_kl": interval(values),
            "top1": statistics.mean(same[kind]),
            "agreed_median": statistics.median(lengths[kind]),
            "agreed_lowest": min(lengths[kind]),
            "parted": len(of_kind),
            "ties": sum(margin <= noise for margin in of_kind),
            "largest_margin": max(of_kind, default=0.0),
        }
    show(row)
    return row


def interval(values: list[float]) -> dict[str, float]:
    """Mean over prompts, and its 95% percentile bootstrap."""
    array = np.array(values)
    draws = np.random.default_rng(0).integers(len(array), size=(RESAMPLES, len(array)))
    low, high = np.quantile(array[draws].mean(1), (0.025, 0.975))
    return {"value": float(array.mean()), "low": float(low), "high": float(high)}


def show(row: dict[str, Any]) -> None:
    """A Markdown table's line a kind of prompt."""
    for kind in ("chat", "random"):
        one = row[kind]
        kl = one["mean_kl"]
        print(
            f"| {row['product']} | {kind} | {kl['value']:.1e} ({kl['low']:.1e} to {kl['high']:.1e}) "
            f"| {100 * one['top1']:.1f}% | {one['agreed_median']:g} ({one['agreed_lowest']}) "
            f"| {one['ties']} of {one['parted']} | {one['largest_margin']:.2f} | {row['noise']:.2f} |",
            flush=True,
        )


def margins(all_cases: list[Case]) -> dict[str, dict[str, float]]:
    """How near the reference's two best tokens are, in logits: quantiles by kind of prompt."""
    found = {}
    for kind in ("chat", "random"):
        wanted = torch.cat([case.wanted for case in all_cases if case.kind == kind])
        gap = -wanted.topk(2, dim=-1).values.diff(dim=1)[:, 0]
        found[kind] = {
            name: float(gap.quantile(q)) for name, q in (("10%", 0.1), ("25%", 0.25), ("50%", 0.5))
        }
        print(f"reference's margin, {kind}: {found[kind]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path, required=True, help="where models are, or are made")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers", type=Path, default=REPOSITORY, help="where .venv-NAME are")
    parser.add_argument("--llama-server", type=Path, help="a llama-server for this machine")
    parser.add_argument("--write", action="store_true", help="keep the result")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = prepare("demo", options.cache)
    exact: dict[str, Any] = {"dtype": torch.float32, "backend": "torch", "activation_bits": 16}
    all_cases = cases(model, load(model.folder, **exact))
    gaps = margins(all_cases)
    print("| product | prompts | KLD mean (95%) | top-1 | agreed | ties of partings | largest margin | noise |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    rows = [measure("the GGUF file's weights, fp32", ours(model.gguf, **exact), all_cases)]
    for bits in (16, 8):
        native = ours(model.folder, engine="native", activation_bits=bits)
        rows.append(measure(f"weightpath W4A{bits}", native, all_cases))
    rows.append(measure("transformers, bf16", ours(model.folder, activation_bits=16), all_cases))
    python = peer_python("llama", options.peers)
    if python is None and options.llama_server is None:
        print(absent("llama", "llama.cpp"))
    else:
        server = str(options.llama_server) if options.llama_server else None
        request = {
            "do": "load", "gguf": str(model.gguf), "threads": options.threads,
            "context": CONTEXT, "server": server,
        }  # fmt: skip
        with peer(python or sys.executable, "llama_worker.py", request) as logits:
            rows.append(measure("llama.cpp Q4_0", logits, all_cases))
    python = peer_python("openvino", options.peers)
    if python is None:
        print(absent("openvino", "OpenVINO"))
    else:
        for name, settings in (("its defaults", {}), ("f32, nothing quantized", EXACT)):
            request = {
                "do": "compile", "folder": str(model.openvino), "threads": options.threads,
                "settings": settings,
            }  # fmt: skip
            with peer(python, "openvino_worker.py", request) as logits:
                rows.append(measure(f"OpenVINO int4, {name}", logits, all_cases))
    if options.write:
        finish("peer-agreement", {"length": LENGTH, "margins": gaps, "rows": rows})


if __name__ == "__main__":
    main()
