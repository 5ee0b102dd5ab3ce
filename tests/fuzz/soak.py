"""Opens thousands of damaged checkpoints, and says how each format took it.

    python tests/fuzz/soak.py --cases 10000            all formats, about 25 cases a second and core
    python tests/fuzz/soak.py --formats gptq-v1 --case 17 --keep damaged

A case is told by seed, format and number: the same three give the same files. Each is opened, read
and (one in five) converted by worker.py in a process of its own, which is killed after --timeout
seconds. The only outcomes allowed are success and an error of the project of one line. Exit code 1
where there was another; each is listed with the command that repeats it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutate import Files, mutate

from tiny_formats import FORMATS, write

HERE = Path(__file__).resolve().parent
WORKER = HERE / "worker.py"
MEGABYTE = 1 << 20
ALLOWED = ("read", "refused")
TARGETS = ("compressed-tensors", "awq", "gptq", "gptq_v2", "gguf", "int8")
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"tokenizer": True} for name in FORMATS},
    "awq-gemm sharded": {"shards": 2, "place": "both"},
    "awq-gemm no config": {"place": "missing"},
    "awq-gemm nested": {"place": "nested"},
    "gptq-v1 3 bits sharded": {"bits": 3, "shards": 3, "symmetric": False, "place": "both"},
    "gptq-v1 ordered": {"ordered": True, "tokenizer": True},
    "gptq-v2 2 bits": {"bits": 2, "symmetric": False},
    "ct-packed asymmetric": {"symmetric": False, "tokenizer": True},
    "ct-packed 5 bits no config": {"bits": 5, "place": "missing"},
    "torchao-int4 sharded": {"shards": 2},
    "bnb-nf4 nested": {"nested": True},
    "hqq 3 bits axis 0": {"bits": 3, "axis": 0, "group_size": 64},
    "gguf Q4_K": {"kind": "Q4_K"},
    "gguf Q8_0": {"kind": "Q8_0"},
}
"""Checkpoints that are damaged: the format is the first word, the rest are write's options."""


BESIDE: dict[str, dict[str, Any]] = {
    "generation_config.json": {
        "do_sample": True, "temperature": 0.5, "top_k": 40, "top_p": 0.9, "eos_token_id": [0, 1],
    },
    "special_tokens_map.json": {"bos_token": {"content": "<|start|>", "lstrip": False}},
}  # fmt: skip
"""What else stands beside a tokenizer, and is read where a GGUF is made."""


@dataclass(frozen=True)
class Case:
    """One damaged checkpoint. number counts within its variant."""

    seed: int
    variant: str
    number: int

    @property
    def again(self) -> str:
        return f"--seed {self.seed} --formats '{self.variant}' --case {self.number}"


@dataclass(frozen=True)
class Result:
    """What became of a case. anonymous: bytes that it held at its peak beyond what was there."""

    case: Case
    what: str
    outcome: str
    detail: str
    anonymous: int


@dataclass(frozen=True)
class Pristine:
    """A sound checkpoint: its files, and the name of the file to open, "" for the folder."""

    files: Files
    opens: str


def pristine(variant: str, folder: Path) -> Pristine:
    """A variant written once, and held in memory."""
    name = variant.split()[0]
    written = write(name, folder, **VARIANTS[variant])
    root = written.path if written.path.is_dir() else written.folder
    files = {path.name: path.read_bytes() for path in sorted(root.iterdir()) if path.is_file()}
    if "tokenizer.json" in files:
        files |= {name: json.dumps(content).encode() for name, content in BESIDE.items()}
    return Pristine(files, "" if written.path.is_dir() else written.path.name)


class Worker:
    """worker.py, started when it is needed and again after it had to be killed."""

    def __init__(
        self, bound: int, timeout: float, warm: Iterable[Path] = (), program: Path = WORKER
    ) -> None:
        self.bound, self.timeout, self.warm = bound, timeout, list(warm)
        self.program = program
        self.process: subprocess.Popen[str] | None = None
        self.errors: Any = None

    def run(self, path: Path, target: str | None, out: Path) -> dict[str, Any]:
        """The answer for one case; outcome "hung" or "died" where there was none."""
        if self.process is None or self.process.poll() is not None:
            self._start(out.parent)
        return self._ask(path, target, out, limited=True, timeout=self.timeout)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.errors.close()
        self.process = None

    def _start(self, out: Path) -> None:
        """A new process, which has imported and allocated all that sound checkpoints need."""
        self.close()
        paths = os.pathsep.join([str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
        settings = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self.process = subprocess.Popen(
            [sys.executable, str(self.program), str(self.bound)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
            env=os.environ | settings,
        )  # fmt: skip
        for path in self.warm:
            for target in ("gguf", "int8"):
                answer = self._ask(path, target, out / target, limited=False, timeout=120)
                if answer["outcome"] not in ALLOWED:
                    raise RuntimeError(f"{path} as it was written: {answer}")

    def _ask(
        self, path: Path, target: str | None, out: Path, limited: bool, timeout: float
    ) -> dict[str, Any]:
        process = self.process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        case = {"path": str(path), "target": target, "out": str(out), "limited": limited}
        try:
            process.stdin.write(json.dumps(case) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return self._lost("died")
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout):
                return self._lost("hung")
        line = process.stdout.readline()
        return json.loads(line) if line else self._lost("died")

    def _lost(self, outcome: str) -> dict[str, Any]:
        """Kill the process, and give the last of what it said."""
        process, errors = self.process, self.errors
        assert process is not None
        if outcome == "hung":
            process.send_signal(6)  # faulthandler then says where it was
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        errors.seek(0)
        said = errors.read().decode(errors="replace").splitlines()
        frames = [
            line.strip() for line in said if line.lstrip().startswith("File ")
        ]  # inmost first
        shown = frames[:6] or said[-3:]
        self.close()
        detail = f"exit {process.returncode}: {' < '.join(shown)}"
        return {"outcome": outcome, "detail": detail, "anonymous": 0}


def soak(
    cases: Iterable[Case],
    room: Path,
    *,
    bound: int = 400 * MEGABYTE,
    timeout: float = 20.0,
    convert_every: int = 5,
    progress: Callable[[Result], None] | None = None,
    keep: Path | None = None,
) -> list[Result]:
    """Run the cases one after another in `room`, a folder of its own; results in their order.

    bound: bytes that a case may allocate. keep: a folder that the last damaged checkpoint is left
    in.
    """
    made: dict[str, Pristine] = {}
    results: list[Result] = []
    warm = [write(name, room / f"warm-{name}", tokenizer=True).path for name in ("gguf", "gptq-v1")]
    worker = Worker(bound, timeout, warm)
    try:
        for case in cases:
            if case.variant not in made:
                made[case.variant] = pristine(case.variant, room / case.variant.replace(" ", "-"))
            sound = made[case.variant]
            draw = random.Random(f"{case.seed}/{case.variant}/{case.number}")
            files, what = mutate(sound.files, draw)
            target = draw.choice(TARGETS) if draw.randrange(convert_every) == 0 else None
            if "token" in what or "generation" in what:  # only a GGUF is made from these
                target = "gguf"
            folder, out = room / "case", room / "out"
            _lay_out(folder, files)
            answer = worker.run(folder / sound.opens, target, out / "made")
            shutil.rmtree(out, ignore_errors=True)
            results.append(Result(case, f"{what} -> {target}" if target else what, **answer))
            if keep is not None:
                _lay_out(keep, files)
            if progress is not None:
                progress(results[-1])
    finally:
        worker.close()
    return results


def failures(results: Iterable[Result]) -> list[Result]:
    return [result for result in results if result.outcome not in ALLOWED]


def told(result: Result) -> str:
    """A failure in words, with what repeats it."""
    return (
        f"{result.outcome}: {result.detail}\n"
        f"    after {result.what}\n    python tests/fuzz/soak.py {result.case.again}"
    )


def numbered(cases: int, seed: int, variants: Iterable[str]) -> list[Case]:
    """As many cases, taken from the variants in turn."""
    names = list(variants)
    return [Case(seed, names[i % len(names)], i // len(names)) for i in range(cases)]


def _lay_out(folder: Path, files: Files) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def _summary(results: list[Result], seconds: float) -> str:
    """A line a variant, how often each outcome was, then each kind of failure once."""
    counts: dict[str, Counter[str]] = {}
    for result in results:
        outcome = result.outcome if result.outcome in ALLOWED else "failed"
        counts.setdefault(result.case.variant, Counter())[outcome] += 1
    lines = [f"{'checkpoint':<28}{'read':>8}{'refused':>9}{'failed':>8}"]
    for variant, found in sorted(counts.items()):
        lines.append(f"{variant:<28}{found['read']:>8}{found['refused']:>9}{found['failed']:>8}")
    wrong = failures(results)
    kinds: dict[str, list[Result]] = {}
    for result in wrong:
        kinds.setdefault(f"{result.outcome} {result.detail[:160]}", []).append(result)
    for alike in sorted(kinds.values(), key=len, reverse=True):
        lines.append(f"\n{len(alike)} x {told(alike[0])}")
    peak = max((result.anonymous for result in results), default=0)
    lines.append(
        f"\n{len(results)} cases in {seconds:.0f} s, {len(wrong)} failed; at most "
        f"{peak / MEGABYTE:.0f} MiB held by a case"
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Open damaged checkpoints of every format.")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--formats", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--case", type=int, help="run this one case of the one format named")
    parser.add_argument("--keep", type=Path, help="leave the last damaged checkpoint here")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds a case may take")
    parser.add_argument("--megabytes", type=int, default=400, help="MiB a case may allocate")
    asked = parser.parse_args()
    if asked.case is None:
        cases = numbered(asked.cases, asked.seed, asked.formats)
    else:
        cases = [Case(asked.seed, variant, asked.case) for variant in asked.formats]
    started, done, wrong = time.monotonic(), 0, 0

    def progress(result: Result) -> None:
        nonlocal done, wrong
        done, wrong = done + 1, wrong + (result.outcome not in ALLOWED)
        every = 10 if sys.stderr.isatty() else max(1, len(cases) // 20)
        if done % every == 0 or done == len(cases):
            rate = done / (time.monotonic() - started)
            end = "\r" if sys.stderr.isatty() and done < len(cases) else "\n"
            print(f"{done} of {len(cases)} cases, {wrong} failed, {rate:.0f} a second", end=end,
                  file=sys.stderr, flush=True)  # fmt: skip

    with tempfile.TemporaryDirectory(prefix="weightpath-fuzz-") as room:
        results = soak(cases, Path(room), bound=asked.megabytes * MEGABYTE, timeout=asked.timeout,
                       progress=progress, keep=asked.keep)  # fmt: skip
    if asked.case is not None:
        print("\n".join(f"{result.outcome}: {result.detail} after {result.what}" for result in results))  # fmt: skip
    print(_summary(results, time.monotonic() - started))
    return 1 if failures(results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
