"""Opens damaged checkpoints in a process of its own, one JSON line a case in and one out.

A case: {"path": what to open, "target": a format to convert to or null, "out": where}. Its answer:
{"outcome": "read" | "refused" | a failure, "detail": text, "anonymous": bytes at the peak}. Read
means that everything asked for went through; refused, that some of it was a WeightpathError of one
line. Everything else is a failure: another exception, a warning, an error of many lines, an output
that cannot be opened again. Memory is bounded by RLIMIT_DATA, set anew for each case, so that a
large allocation fails where it is asked for.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import resource
import sys
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from weightpath.checkpoints.low_bit import LowBitCheckpoint, open_low_bit
from weightpath.checkpoints.read_linear import ReadLinear
from weightpath.errors import WeightpathError

LONGEST_MESSAGE = 2000


def main(bound: int) -> None:
    """Answer cases from stdin until it ends. bound: bytes that a case may allocate."""
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints must not be taken for an answer
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for line in sys.stdin:
        case = json.loads(line)
        if case["limited"]:
            data = _status("VmData") + bound
            resource.setrlimit(resource.RLIMIT_DATA, (data, resource.RLIM_INFINITY))
        before, _ = _status("RssAnon"), _reset_peak()
        outcome, detail = _run(case)
        peak = max(_status("VmHWM") - _status("RssFile") - _status("RssShmem"), before)
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        answers.write(
            json.dumps({"outcome": outcome, "detail": detail, "anonymous": peak - before}) + "\n"
        )
        answers.flush()


def _run(case: dict[str, Any]) -> tuple[str, str]:
    """Outcome and detail of one case."""
    refusals: list[str] = []
    for what, step in _steps(case):
        try:
            step()
        except WeightpathError as error:
            refusals.append(str(error))
            if wrong := _unsound(str(error)):
                return wrong, f"{what}: {len(str(error))} characters: {ascii(str(error))[:300]}"
        except BaseException as error:
            kind = "warning" if isinstance(error, Warning) else "uncaught"
            return f"{kind} {type(error).__name__}", f"{what}: {_tail(error)}"
    return ("refused", refusals[0]) if refusals else ("read", "")


def _unsound(message: str) -> str:
    """What is wrong with a message that should be one short line of printable text; "" if nothing."""
    if len(message.splitlines()) != 1:
        return "not one line"
    if any(unicodedata.category(sign) in ("Cc", "Cs") for sign in message):
        return "unprintable message"
    return "endless message" if len(message) > LONGEST_MESSAGE else ""


def _steps(case: dict[str, Any]) -> Iterator[tuple[str, Callable[[], object]]]:
    """What is done with a checkpoint: opened, each linear and float read; examined and converted
    where there is a target."""
    path, opened = Path(case["path"]), list[LowBitCheckpoint]()
    yield "open", lambda: opened.append(open_low_bit(path))
    for low in opened:
        yield "linears", lambda low=low: low.linears
        for module in low.parts:
            yield f"outline {module}", lambda low=low, module=module: low.outline(module)
            yield f"read {module}", lambda low=low, module=module: _use(low.read_linear(module))
            yield f"bytes {module}", lambda low=low, module=module: low.stored_bytes(module)
        yield "floats", lambda low=low: _use_floats(low)
        yield "companions", lambda low=low: [file.stat() for file in low.companions]
    opened.clear()
    if not case["target"]:
        return
    out, done, (convert, examine) = Path(case["out"]), [], _jobs()
    yield "examine", lambda: _told(examine(path, tp=(2,)))
    yield "convert", lambda: done.append(convert(str(path), case["target"], out))
    if done:
        yield "open what was converted", lambda: _again(case["target"], done[0].folder)


def _jobs() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """convert and examine, whose imports take seconds and may warn; the first that asks waits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from weightpath.jobs.convert import convert
        from weightpath.jobs.examine import examine
    return convert, examine


def _told(examination: Any) -> None:
    """Every finding is one line, as an error is."""
    for finding in examination.findings:
        wrong = _unsound(finding.line)
        assert not wrong, f"finding: {wrong}: {ascii(finding.line)[:300]}"


def _use(read: ReadLinear) -> None:
    """Touch every value of a linear."""
    read.weight().sum()


def _use_floats(low: LowBitCheckpoint) -> None:
    for _, tensor in low.read_floats():
        if tensor.numel():
            tensor.contiguous().reshape(-1).view(torch.uint8).max()


def _again(target: str, place: Path) -> None:
    """What convert wrote is opened and read; a refusal is a failure here."""
    try:
        low = open_low_bit(place)
        for module in low.linears:
            _use(low.read_linear(module))
    except WeightpathError as error:
        if "holds float weights" in str(error):  # nothing could be kept in low bits, which is told
            return
        raise AssertionError(f"what was converted to {target} is refused: {error}") from error


def _tail(error: BaseException) -> str:
    """The last lines of a traceback that are of the package, and the error, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames if "site-packages" not in f.filename]  # fmt: skip
    return f"{' > '.join(own[-4:])}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _status(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def _reset_peak() -> None:
    """Let VmHWM begin anew. Where the kernel does not allow it, peaks are those of earlier cases."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main(int(sys.argv[1]))
