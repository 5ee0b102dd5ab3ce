"""Whole models on the CPU, this package beside llama.cpp and OpenVINO GenAI: tokens a second.

    python benchmarks/cpu_decode.py --cache FOLDER [--models demo,1b] [--threads 2] [--rounds 5]
                                    [--measures "prefill,decode,decode deep"]
                                    [--engine native] [--peers FOLDER] [--llama-server BINARY]
                                    [--llama-batch 512] [--tokenizer FOLDER] [--label NAME]
                                    [--write]

prefill      a prompt of 512 tokens into an empty cache, the first token after it included
decode       64 greedy tokens after a prompt of 16
decode deep  32 greedy tokens after a prompt of 2,048
load         from the call that loads to the first token of 8, in a fresh process whose imports are
             done, files in the page cache; ours from the packed weights kept beside the model
             (engine/tiles_cache.py) and, as "packing", without them

Ours with 8-bit and with 16-bit activations. One model, the same weights for all
(decode_models.py), batch of one. Every product runs in a process of its own (peer_workers/), with
so many threads and at its best settings; they take turns, and so does the read bandwidth of as many
threads over 1 GiB. Beside tokens/s stand the bytes of low-bit weights that a token reads, times
tokens/s, as a share of that bandwidth (keys and values not counted), ours over each peer round by
round, and how many of the first tokens are ours.

Peers come from .venv-llama and .venv-openvino under --peers (tests/interop/install_peer.py); one
that is not there is left out with a line. The wheel of llama.cpp is built for AVX2: --llama-server
names a llama-server built for this machine, which is what to compare with. --write keeps the result
in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from common import REPOSITORY, finish
from decode_models import NAMES, BenchModel, prepare
from peer_process import PeerProcess, absent, peer_python
from weightpath.bench.timing import Ratio, Timing, ratio, sample_in_turns, sampler
from weightpath.kernels import cpu
from weightpath.version import __version__

MEASURES = {"prefill": (512, 0), "decode": (16, 64), "decode deep": (2048, 32)}
"""Tokens of the prompt, and steps after it."""
CONTEXT = 2304
READ_BYTES = 1 << 30
SPIN = {"GOMP_SPINCOUNT": "10000"}
"""For every process: libgomp's threads else spin on into the next one's turn."""


@dataclass(frozen=True)
class Product:
    """One runtime: its worker, how it is asked to load, and bytes of weights a token reads."""

    name: str
    python: Path | str
    script: str
    load: dict[str, Any]
    asks: dict[str, Any]  # what its version depends on
    weight_bytes: int
    version: str

    def start(self) -> PeerProcess:
        return PeerProcess(self.python, self.script, {**os.environ, **SPIN})


def products(arguments: argparse.Namespace, model: BenchModel) -> list[Product]:
    """What is here to be measured, ours first; a line for each that is not."""
    threads, found = arguments.threads, []

    def add(name: str, python: Path | str, script: str, weight_bytes: int, asks: dict[str, Any],
            versions: dict[str, str] | None = None, **load: Any) -> None:  # fmt: skip
        if versions is None:
            with PeerProcess(python, script, {**os.environ, **SPIN}) as worker:
                versions = worker.ask(do="versions", **asks)
        found.append(
            Product(name, python, script, {**load, "threads": threads}, asks, weight_bytes,
                    " ".join(f"{key} {value}" for key, value in versions.items()))
        )  # fmt: skip

    for bits in (8, 16):  # 8 first: the peers quantize activations to 8 bits too
        add(f"weightpath W4A{bits}", sys.executable, "ours_worker.py", model.folder_bytes,
            {}, {"weightpath": __version__}, folder=str(model.folder), engine=arguments.engine,
            context=CONTEXT, activation_bits=bits, cache=arguments.engine == "native")  # fmt: skip
    python = peer_python("llama", arguments.peers)
    server = str(arguments.llama_server) if arguments.llama_server else None
    if python is None and server is None:
        print(absent("llama", "llama.cpp"))
    else:
        add("llama.cpp Q4_0", python or sys.executable, "llama_worker.py", model.gguf_bytes,
            {"server": server}, gguf=str(model.gguf), context=CONTEXT, server=server,
            batch=arguments.llama_batch)  # fmt: skip
    python = peer_python("openvino", arguments.peers)
    if python is None:
        print(absent("openvino", "OpenVINO GenAI"))
    else:
        with PeerProcess(python, "openvino_worker.py", {**os.environ, **SPIN}) as worker:
            made = worker.ask(do="prepare", gguf=str(model.gguf), folder=str(model.openvino))
        add("OpenVINO int4", python, "openvino_worker.py", made["weight_bytes"], {},
            folder=str(model.openvino))  # fmt: skip
    return found


def speeds(
    arguments: argparse.Namespace, model: BenchModel, found: list[Product]
) -> Iterator[tuple[str, dict[str, Timing], Timing, dict[str, list[int]]]]:
    """A measure, tokens/s of every product, read GB/s beside them, and the tokens that came."""
    draw = torch.Generator().manual_seed(0)
    longest = max(length for length, _ in MEASURES.values())
    ids = torch.randint(model.vocabulary, (longest,), generator=draw).tolist()
    memory, module = cpu.fresh_memory(READ_BYTES).fill_(1), cpu.extension()
    read = sampler(lambda: module.read_all(memory.data_ptr(), memory.numel(), arguments.threads), 2)
    tokens: dict[str, list[int]] = {}
    with ExitStack() as running:
        workers = {one.name: running.enter_context(one.start()) for one in found}
        for one in found:
            workers[one.name].ask(do="load", **one.load)

        def sample(name: str, measure: str) -> Callable[[], float]:
            length, steps = MEASURES[measure]

            def once() -> float:
                done = workers[name].ask(do="speed", prompt=ids[:length], steps=steps)
                tokens[name] = done["tokens"]
                if steps:
                    return steps / done["decode_seconds"]
                return length / done["prefill_seconds"]

            once()  # caches, memory and threads are there after it
            return once

        for measure in filter(None, arguments.measures.split(",")):
            calls = {one.name: sample(one.name, measure) for one in found}
            calls["read"] = lambda: READ_BYTES / read() / 1e9
            got = sample_in_turns(calls, arguments.rounds)
            limit = Timing.of(got.pop("read"), "GB/s")
            yield measure, {n: Timing.of(v, "tokens/s") for n, v in got.items()}, limit, tokens


def loads(
    arguments: argparse.Namespace, found: list[Product]
) -> tuple[dict[str, Timing], dict[str, int]]:
    """Seconds from load to first token, each in a fresh process; and anonymous bytes after it,
    where a product's worker says them."""
    anonymous: dict[str, int] = {}

    def sample(one: Product) -> Callable[[], float]:
        cached = one.load.get("cache")

        def once() -> float:
            with one.start() as worker:
                worker.ask(do="versions", **one.asks)  # answered when its imports are done
                done = worker.ask(do="load", **one.load)
            if "from_cache" in done and done["from_cache"] != cached:
                sys.exit(f"{one.name}: from its cache: {done['from_cache']}, wanted {cached}")
            anonymous[one.name] = done.get("anonymous_bytes", 0)
            return done["first_seconds"]

        return once

    packing = [
        replace(one, name=f"{one.name}, packing", load={**one.load, "cache": False})
        for one in found
        if one.load.get("cache")
    ]
    for one in found:  # the caches are written, and files in memory, after one load
        if one.load.get("cache"):
            with one.start() as worker:
                worker.ask(do="load", **one.load)
    got = sample_in_turns({one.name: sample(one) for one in (*found, *packing)}, arguments.loads)
    return {name: Timing.of(values) for name, values in got.items()}, anonymous


def spread(timing: Timing, digits: int = 1) -> str:
    return f"{timing.median:.{digits}f} ({timing.low:.{digits}f} to {timing.high:.{digits}f})"


def equal_at_first(ours: list[int], theirs: list[int]) -> int:
    """How many tokens agree before the first that does not."""
    pairs = list(zip(ours, theirs, strict=True))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def one_model(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """Measure and print one model."""
    model = prepare(name, arguments.cache, arguments.tokenizer)
    found = products(arguments, model)
    for one in found:
        print(f"{name}: {one.name}: {one.version}, {one.weight_bytes / 1e6:.1f} MB a token")
    ours, rows = found[0], []
    rates: dict[str, dict[str, Timing]] = {}
    same: dict[str, int] = {}
    for measure, by_product, limit, tokens in speeds(arguments, model, found):
        rates[measure] = by_product
        if measure == "decode":
            same = {key: equal_at_first(tokens[ours.name], value) for key, value in tokens.items()}
        print(f"{name} {measure}, tokens/s; reads {spread(limit)} GB/s")
        for one in found:
            rate = by_product[one.name]
            gbs = one.weight_bytes * rate.median / 1e9
            share = "" if measure == "prefill" else f"  {gbs:.1f} GB/s, {gbs / limit.median:.0%}"
            beside: Ratio | None = None
            if one is not ours:
                beside = ratio(by_product[ours.name], rate)
                share += f"  ours {beside}"
            print(f"  {one.name:24} {spread(rate):28}{share}", flush=True)
            rows.append(
                {"measure": measure, "name": one.name, "tokens_per_s": _three(rate),
                 "weight_bytes": one.weight_bytes, "read_gb_per_s": _three(limit),
                 "ours_over": None if beside is None else [beside.median, beside.low, beside.high]}
            )  # fmt: skip
    deep: dict[str, float] = {}
    if {"decode", "decode deep"} <= set(rates):
        print(f"{name}: decode after 2,048 tokens over decode after 16")
        for one in found:
            after = ratio(rates["decode deep"][one.name], rates["decode"][one.name])
            deep[one.name] = after.median
            print(f"  {one.name:24} {after.median:.0%}")
    first: dict[str, Timing] = {}
    anonymous: dict[str, int] = {}
    if arguments.loads:
        first, anonymous = loads(arguments, found)
        print(f"{name}: seconds from load to the first token")
        for key, timing in first.items():
            held = f"  {anonymous[key] / 1e6:.0f} MB anonymous" if anonymous[key] else ""
            print(f"  {key:34} {spread(timing, 2)}{held}")
    for key, count in same.items():
        print(f"{name}: {key}: the first {count} of {same[ours.name]} tokens are ours")
    return {
        "products": {one.name: one.version for one in found},
        "rows": rows,
        "deep_over_short": deep,
        "first_token_seconds": {key: _three(value) for key, value in first.items()},
        "first_token_anonymous_bytes": {key: value for key, value in anonymous.items() if value},
        "equal_at_first": same,
    }


def _three(timing: Timing) -> list[float]:
    return [timing.median, timing.low, timing.high]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, required=True, help="where models are made, once")
    parser.add_argument("--models", default=",".join(NAMES))
    parser.add_argument("--measures", default=",".join(MEASURES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loads", type=int, default=3, help="fresh processes of each; 0: none")
    parser.add_argument("--engine", choices=("transformers", "native"), default="native")
    parser.add_argument("--peers", type=Path, default=REPOSITORY, help="where .venv-NAME lie")
    parser.add_argument("--llama-server", type=Path, help="one built for this machine")
    parser.add_argument("--llama-batch", type=int, default=512, help="its rows of a step at most")
    parser.add_argument("--tokenizer", type=Path, help="config and tokenizer of random models")
    parser.add_argument("--label", default="", help="ends the name of the written result")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    print(
        f"{arguments.threads} threads, instruction set {cpu.chosen_instruction_set()}, load "
        f"{os.getloadavg()[0]:.1f} before"
    )
    body: dict[str, Any] = {"threads": arguments.threads, "engine": arguments.engine, "models": {}}
    for name in arguments.models.split(","):
        body["models"][name] = one_model(arguments, name)
    body["load_after"] = os.getloadavg()[0]
    if arguments.write:
        label = f"-{arguments.label}" if arguments.label else ""
        finish(f"cpu-decode-{arguments.threads}{label}", body)
    else:
        print(json.dumps({"kind": "cpu-decode", **body}))


if __name__ == "__main__":
    main()
