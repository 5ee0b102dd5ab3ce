"""Everything `weightpath inspect` tells of a checkpoint: counts, problems, and who loads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from weightpath.checkpoints.audit import Finding, finding_of
from weightpath.checkpoints.gguf import GGUFCheckpoint
from weightpath.checkpoints.low_bit import LowBitCheckpoint
from weightpath.checkpoints.opened import Outline, outline_of
from weightpath.checkpoints.read_linear import ReadLinear
from weightpath.device.probe import probe
from weightpath.engine import skeleton
from weightpath.engine.load import Progress, model_dtype, no_progress
from weightpath.errors import BadCheckpoint, BadRequest, BadTensor
from weightpath.jobs.findings import float_findings, name_findings, value_findings
from weightpath.jobs.held import held_of
from weightpath.jobs.inspect import Inspection, inspect_folder, open_any
from weightpath.layouts import awq_kernel
from weightpath.paths.acceptance import accepts
from weightpath.paths.held import Held, Verdict
from weightpath.paths.splits import Split, splits
from weightpath.scheme import PER_CHANNEL

KERNELS = ("awq",)


@dataclass(frozen=True)
class KernelLimit:
    """One linear that a kernel's layout, or the kernel itself, refuses: why, and the mend."""

    name: str
    problem: str
    mend: str


@dataclass(frozen=True)
class Examination:
    """How a checkpoint was recognised, its counts, what is wrong with it, which runtimes load it;
    splits that do not work, and a kernel's refusals, where they were asked for.

    acceptance: of the format and what could be read of it, as if errors among the findings were
    mended. split_checked: splits that were asked, over every tp; split_unknown: linears whose names
    tell neither rows nor columns, so that none was. device_refuses: why this machine cannot run the
    kernel at all, or "".
    """

    inspection: Inspection
    how: str
    notes: tuple[str, ...]
    findings: tuple[Finding, ...]
    acceptance: tuple[Verdict, ...]
    splits: tuple[Split, ...] = ()
    split_checked: int = 0
    split_unknown: int = 0
    kernel: tuple[KernelLimit, ...] = ()
    kernel_checked: int = 0
    device_refuses: str = ""

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(found for found in self.findings if found.severity == "error")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; the counts at the top, as they were before there was more."""
        rest = {key: value for key, value in asdict(self).items() if key != "inspection"}
        return self.inspection.to_dict() | rest


def examine(
    where: Path,
    tp: Sequence[int] = (),
    kernel: str | None = None,
    progress: Progress = no_progress,
) -> Examination:
    """Look at a checkpoint. tp: tensor-parallel sizes to try. kernel: one of KERNELS.

    Linears that cannot be read are findings, and left out of the counts. BadCheckpoint where the
    folder itself cannot be opened; BadRequest for a tp below 2 or an unknown kernel.
    """
    for size in tp:
        if size < 2:
            raise BadRequest(f"tp {size}: give sizes of 2 and more, such as --tp 2,4,8")
    if kernel is not None and kernel not in KERNELS:
        raise BadRequest(f"kernel '{kernel}': limits are known of {', '.join(KERNELS)}")
    findings: list[Finding] = []
    outlines: dict[str, Outline] = {}
    opened = open_any(where) if where.exists() else None
    if not isinstance(opened, LowBitCheckpoint):
        inspection = inspect_folder(where, progress=progress)
        assert opened is not None  # inspect_folder refuses what does not exist
        dtype = str(model_dtype(opened.config)).removeprefix("torch.")
        is_gguf = isinstance(opened, GGUFCheckpoint)
        model = _model_of(opened.config, opened.where)
        held = Held(
            "GGUF" if is_gguf else "float",
            dtype=dtype,
            architecture=inspection.architecture,
            no_model=model if isinstance(model, str) else "",
        )
        how = "the file's magic number" if is_gguf else "float weights"
        asked = ("its linears are floats: splits and kernels are asked of low-bit ones",)
        return Examination(
            inspection, how, asked if tp or kernel else (), _once(float_findings(opened)), accepts(held)
        )  # fmt: skip

    def on_read(module: str, read: ReadLinear | BadTensor | BadCheckpoint) -> None:
        if isinstance(read, BadTensor | BadCheckpoint):
            findings.append(finding_of(read))
            return
        outlines[module] = outline_of(module, read)
        findings.extend(value_findings(module, read, opened.config))

    inspection = inspect_folder(where, on_read, progress)
    findings = [*name_findings(opened, outlines), *findings]
    model = _model_of(opened.config, opened.where)
    if isinstance(model, str):
        held = held_of(opened, outlines, "lm_head", model)
    else:
        head = skeleton.head_name(model) or ""
        held = held_of(opened, outlines, head, no_place=_without_place(model, opened))
    asked = _splits(held, tp, opened.config)
    return Examination(
        inspection,
        opened.how,
        opened.notes,
        _once(findings),
        accepts(held),
        tuple(split for split in asked if split.problem),
        sum(split.parallel != "unknown" for split in asked),
        len({split.name for split in asked if split.parallel == "unknown"}),
        _kernel_limits(outlines) if kernel else (),
        len(outlines) if kernel else 0,
        _device_refuses() if kernel else "",
    )


def _model_of(config: Mapping[str, Any], where: str) -> PreTrainedModel | str:
    """The model on the meta device, or why transformers makes none of a config.json."""
    try:
        return skeleton.build(config, torch.bfloat16, where)
    except BadCheckpoint as error:
        return error.problem


def _without_place(model: PreTrainedModel, low: LowBitCheckpoint) -> tuple[str, ...]:
    """Packed linears that are none of the model's, and floats that it neither holds nor ignores."""
    linears, table = skeleton.linears(model), skeleton.embedding_name(model)
    held = {*model.state_dict(), *dict(model.named_buffers())}
    packed = [name for name in low.parts if name not in linears and name != table]
    floats = [
        name
        for name in low.floats
        if name not in held
        and not skeleton.recomputed(name)
        and not skeleton.unused(model, name)
        and not skeleton.empty_bias(linears, name, low.source.read)
    ]
    return (*packed, *floats)


def _once(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Findings without those that say of one tensor what another says too."""
    return tuple(dict.fromkeys(findings))


def _splits(held: Held, tp: Sequence[int], config: dict[str, Any]) -> list[Split]:
    section = config.get("text_config")
    section = section if isinstance(section, dict) else config
    heads, kv_heads = section.get("num_attention_heads"), section.get("num_key_value_heads")
    heads = heads if type(heads) is int and heads > 0 else None
    kv_heads = kv_heads if type(kv_heads) is int and kv_heads > 0 else heads
    return [
        split for size in tp for split in splits(held.linears, held.format, size, heads, kv_heads)
    ]


def _kernel_limits(outlines: dict[str, Outline]) -> tuple[KernelLimit, ...]:
    """Linears that the AWQ kernel's layout cannot hold, or that the kernel cannot run."""
    limits = []
    for name, outline in outlines.items():
        n, k = outline.shape
        scheme, other = outline.scheme, "choose another kernel for this linear"
        if scheme is None or scheme.bits != 4:
            bits = "floats" if scheme is None else f"{scheme.bits}-bit"
            limits.append(KernelLimit(name, f"is {bits}, the AWQ kernel takes 4 bits", other))
            continue
        size = k if scheme.group_size == PER_CHANNEL else scheme.group_size
        refusal = awq_kernel.layout_refuses(n, k, size)
        if refusal is None:
            lowest = awq_kernel.KERNEL_CAPABILITY
            said = awq_kernel.kernel_refuses(n, k, 1, torch.float16, lowest)
            refusal = None if said is None else (said, other)
        if refusal is None and not outline.plain:  # what a conversion mends comes last
            what = (
                "a column order"
                if outline.ordered
                else "float minimums"
                if outline.minimums
                else "column scales"
            )
            mend = "convert it first: --to compressed-tensors"
            refusal = (f"has {what}, which the AWQ kernel has not", mend)
        if refusal is not None:
            limits.append(KernelLimit(name, *refusal))
    return tuple(limits)


def _device_refuses() -> str:
    """Why this machine cannot run the AWQ kernel, whatever the shapes, or ""."""
    rows, columns = awq_kernel.KERNEL_ROWS, awq_kernel.KERNEL_COLUMNS
    capability = probe().gpu_capability
    return awq_kernel.kernel_refuses(rows, columns, 1, torch.float16, capability) or ""
