"""Convert a low-bit or float checkpoint to one GGUF file that llama.cpp opens.

Linears become the blocks that hold their integers (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0), other matrices
F16, vectors F32; names, q and k row order, and the tokenizer are written too (gguf_write.py). The
file grows beside its place and is moved there when whole: a killed run starts again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from weightpath.checkpoints.gguf import GGUFCheckpoint
from weightpath.checkpoints.gguf_write import Stored, Weight, float_weights, write_gguf
from weightpath.checkpoints.low_bit import open_low_bit
from weightpath.checkpoints.store import open_checkpoint, quantization_method
from weightpath.engine.load import Progress
from weightpath.errors import BadRequest
from weightpath.jobs.conversion import (
    Converted,
    ConvertedTensor,
    Work,
    prepare,
    refuse_known_losses,
    without_settings,
)
from weightpath.jobs.fit import fit
from weightpath.jobs.targets import GGUF, choose_gguf
from weightpath.qweight import QWeight


@dataclass(frozen=True)
class _Steps:
    """What fitting a linear took, without its integers."""

    steps: tuple[str, ...] = ()
    largest_change: float = 0.0
    mean_change: float = 0.0


def convert_to_gguf(
    path: Path, place: Path, exact_only: bool, overwrite: bool, progress: Progress
) -> Converted:
    """Write the checkpoint at `path` as a GGUF file: `place` if it is named .gguf, else in it."""
    stem = path.stem if path.is_file() else path.resolve().name
    file = place if place.suffix == ".gguf" else place / f"{stem}.gguf"
    if file.resolve() == path.resolve():
        raise BadRequest(f"{file}: is the source itself; name another file")
    if place.suffix != ".gguf" and place.is_file():
        raise BadRequest(f"{place}: exists and is no folder; name a folder or a .gguf file")
    with _no_empty_folder(file.parent):
        return _write(path, file, exact_only, overwrite, progress)


def _write(
    path: Path, file: Path, exact_only: bool, overwrite: bool, progress: Progress
) -> Converted:

    def tell(done: int, total: int) -> None:
        progress("converting", done, total)

    if _is_float(path):
        checkpoint = GGUFCheckpoint(path) if path.suffix == ".gguf" else open_checkpoint(path)
        folder = _tokenizer_folder(checkpoint.companions, path)
        written = write_gguf(file, checkpoint.config, float_weights(checkpoint), folder,
                             exact_only=exact_only, overwrite=overwrite, progress=tell)  # fmt: skip
        floats = [_float(name, stored) for name, stored in written.tensors.items()]
        changed = tuple(item for item in floats if not item.exact)
        return Converted(file, "float", GGUF, (), changed, len(floats) - len(changed),
                         written.notes)  # fmt: skip
    low = open_low_bit(path)
    work = prepare(low, choose_gguf, keeps_order=False)
    if exact_only:
        refuse_known_losses(work)
    fitted: dict[str, _Steps] = {}
    weights = {f"{module}.weight": _weight(work, module, fitted) for module in work.choices}
    for name in low.floats:
        if name not in work.left_out:
            weights[name] = Weight(None, _reader(work, name))
    config = without_settings(low.config)
    written = write_gguf(file, config, weights, _tokenizer_folder(low.companions, path),
                         exact_only=exact_only, overwrite=overwrite, progress=tell)  # fmt: skip
    linears, floats = [], []
    for name, stored in written.tensors.items():
        module = name.removesuffix(".weight")
        if module in work.choices:
            linears.append(_linear(work, module, stored, fitted.get(module, _Steps())))
        elif not stored.exact:
            floats.append(_float(name, stored))
    copied = len(written.tensors) - len(linears) - len(floats)
    return Converted(file, low.format, GGUF, tuple(linears), tuple(floats), copied,
                     (*work.notes(), *written.notes))  # fmt: skip


@contextmanager
def _no_empty_folder(folder: Path) -> Iterator[None]:
    """Remove the folder after a refusal, if it was made for this file and holds nothing."""
    existed = folder.exists()
    try:
        yield
    except BaseException:
        if not existed and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        raise


def _is_float(path: Path) -> bool:
    if path.suffix == ".gguf":
        return not GGUFCheckpoint(path).linears
    checkpoint = open_checkpoint(path, float_only=False)
    return quantization_method(checkpoint.config, checkpoint.tensors) is None


def _weight(work: Work, module: str, fitted: dict[str, _Steps]) -> Weight:
    """A linear as the writer wants it: its scheme, and its integers (or floats) when it is due."""
    choice = work.choices[module]

    def read() -> QWeight | Tensor:
        found = work.read(module)
        if choice.scheme is None:
            return found.weight()
        kept = found.qweight
        if kept is not None and not choice.again and kept.scheme == choice.scheme:
            return kept  # float minimums too, which blocks have
        why = work.folds.why_not.get(module) or choice.why
        made = fit(module, found, choice.scheme, choice.scale_dtype, why=why)
        fitted[module] = _Steps(made.steps, made.largest_change, made.mean_change)
        return made.qweight

    return Weight(choice.scheme, read)


def _reader(work: Work, name: str) -> Callable[[], Tensor]:
    return lambda: work.folds.apply_float(name, work.low.source.read(name))


def _linear(work: Work, module: str, stored: Stored, fitted: _Steps) -> ConvertedTensor:
    """What became of a linear: the steps of fitting it, and what its blocks' fp16 rounds."""
    outline = work.low.linears[module]
    steps = list(fitted.steps)
    if work.folds.step(module):
        steps.insert(0, work.folds.step(module))
    steps.append(stored.exactness)
    if work.choices[module].scheme is None:
        steps.append(work.choices[module].why)
    largest = stored.largest_change + fitted.largest_change  # a bound
    mean = stored.mean_change + fitted.mean_change
    was = "floats" if outline.scheme is None else outline.scheme.name
    return ConvertedTensor(
        module, was, stored.kind, largest == 0.0, "; ".join(steps), largest, mean
    )


def _float(name: str, stored: Stored) -> ConvertedTensor:
    return ConvertedTensor(name, "float", stored.kind, stored.exact, stored.exactness,
                           stored.largest_change, stored.mean_change)  # fmt: skip


def _tokenizer_folder(companions: tuple[Path, ...], path: Path) -> Path:
    """The folder of the tokenizer's files: the checkpoint's own, or the one made from a GGUF."""
    if companions:
        return companions[0].parent
    return path if path.is_dir() else path.parent
