"""What a conversion is told by and gives back: records, and the plan that all targets share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from weightpath.checkpoints.audit import Finding, audit_qweight, require_sound, summarise
from weightpath.checkpoints.gguf import GGUFCheckpoint
from weightpath.checkpoints.low_bit import LowBitCheckpoint
from weightpath.checkpoints.opened import Outline
from weightpath.checkpoints.read_linear import ReadLinear
from weightpath.engine.load import model_dtype
from weightpath.engine.skeleton import recomputed
from weightpath.errors import BadRequest, BadTensor
from weightpath.jobs.findings import name_findings
from weightpath.jobs.folds import Folds, plan_folds
from weightpath.jobs.scale_folds import fold_scales
from weightpath.jobs.targets import Choice, cut_groups


@dataclass(frozen=True)
class ConvertedTensor:
    """One linear, or one float tensor that changed: what it was and is, and by how much its values
    changed (absolute). how: the steps, or `codes, scales and zeros kept`."""

    name: str
    source: str
    target: str
    exact: bool
    how: str
    largest_change: float = 0.0
    mean_change: float = 0.0


@dataclass(frozen=True)
class Converted:
    """What was written. served: relative change of fp16 scales that a bf16 model rounds when it is
    loaded (largest, mean), or None."""

    folder: Path
    source_format: str
    format: str
    linears: tuple[ConvertedTensor, ...]
    floats: tuple[ConvertedTensor, ...]
    copied: int
    notes: tuple[str, ...]
    resumed: int = 0
    served: tuple[float, float] | None = None

    @property
    def exact(self) -> int:
        return sum(item.exact for item in self.linears)

    @property
    def lossy(self) -> int:
        return len(self.linears) - self.exact

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self) | {"folder": str(self.folder), "exact": self.exact, "lossy": self.lossy}


@dataclass
class Work:
    """What a conversion goes by: the source, its folds, and every linear's choice.

    findings: of the names; warnings: of the linears' values, by linear.
    """

    low: LowBitCheckpoint
    folds: Folds
    choices: dict[str, Choice]
    float_dtype: torch.dtype
    left_out: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    warnings: dict[str, list[Finding]] = field(default_factory=dict)

    def read(self, module: str) -> ReadLinear:
        """A linear, audited, with its folds applied. BadCheckpoint where its values are unsound."""
        read = self.low.read_linear(module)
        found = (
            [] if read.qweight is None else audit_qweight(module, read.qweight, read.column_scales)
        )
        require_sound(found, self.low.where)
        self.warnings[module] = [finding for finding in found if finding.severity == "warning"]
        return self.folds.apply(module, read)

    def notes(self) -> tuple[str, ...]:
        """What opening and auditing the source showed, and what is left out."""
        said = [f"{name}: left out, it is computed from the config" for name in self.left_out]
        found = [*self.findings, *chain.from_iterable(self.warnings.values())]
        audited = summarise(found, linears=len(self.choices))
        return (*self.low.notes, *audited, *said)

    def float_info(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape in which a float tensor is written: its own. Of a GGUF file's, blocks
        become 16 bits, and so do vectors (norms are F32 there) that lose nothing by it."""
        info = self.low.floats[name]
        shape = tuple(info.shape)
        if not isinstance(self.low.source, GGUFCheckpoint) or info.dtype != torch.float32:
            return info.dtype, shape
        if len(shape) == 1:
            values = self.low.source.read(name)
            if not torch.equal(values.to(self.float_dtype).float(), values):
                return torch.float32, shape
        return self.float_dtype, shape


def prepare(
    low: LowBitCheckpoint,
    choose: Callable[[Mapping[str, Outline]], dict[str, Choice]],
    keeps_order: bool,
    group_size: int | None = None,
) -> Work:
    """Outlines of all linears, the folds of their orders, and the target's choices.

    BadTensor, BadCheckpoint for tensors that do not add up, by themselves or with config.json.
    """
    outlines = dict(low.linears)
    for module in outlines:
        if f"{module}.weight" in low.floats:
            raise BadTensor(
                f"{module}.weight", "is stored both packed and as floats", "remove one of the two"
            )
    folds = Folds(outlines)
    if not keeps_order:
        folds = plan_folds(outlines, low.floats, low.config, low.read_qweight)
    fold_scales(folds, low)
    found = name_findings(low, outlines)
    require_sound(found, low.where)
    choices = choose(folds.outlines)
    if group_size is not None:
        choices = cut_groups(choices, folds.outlines, group_size)
    work = Work(low, folds, choices, _float_dtype(low))
    work.findings = [finding for finding in found if finding.severity == "warning"]
    work.left_out = [name for name in low.floats if recomputed(name)]
    return work


def refuse_known_losses(work: Work) -> None:
    """BadRequest where a linear is known to be quantized again, before anything is read."""
    lossy = [name for name, choice in work.choices.items() if choice.again]
    if lossy:
        why = work.folds.why_not.get(lossy[0]) or work.choices[lossy[0]].why
        raise BadRequest(
            f"{len(lossy)} of {len(work.choices)} linears cannot be converted exactly, first "
            f"{lossy[0]}: {why}; leave out --exact-only to allow the loss, or use another format"
        )


def without_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without any quantization config, at any depth."""
    return {
        key: without_settings(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in ("quantization_config", "compression_config")
    }


def _float_dtype(low: LowBitCheckpoint) -> torch.dtype:
    """The model's 16-bit dtype, for what has to become float."""
    dtype = model_dtype(low.config)
    return dtype if dtype == torch.float16 else torch.bfloat16
