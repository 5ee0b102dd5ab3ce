"""Audit of one linear's numbers: scales, zero points, minimums, column scales.

    w[n, k] = scales[n, g] * (codes[n, k] - zeros[n, g])

One pass over scales and zeros. Codes are looked at only in groups whose scale is 0 or too small
for a runtime's dtype, to tell weights that are lost from groups that hold none, and in rows whose
first codes are all the same. Nothing is raised: QWeight.check refuses, this counts, and names the
first place as [row, group]. float16 is normal from 6.10e-05 to 65504; below 2.98e-08 it is 0.
Sources: IEEE 754 half precision; vLLM issue 48905 (negative scales); TensorRT-LLM issue 16447 (a
zero scale that makes every expert NaN).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weightpath.checkpoints.audit_finding import Finding, Severity
from weightpath.errors import BadRequest
from weightpath.qweight import QWeight, scale_change

_FETCH = "the checkpoint is damaged: quantize or fetch it again"
_CONFIG = "check group_size in the checkpoint's quantization config"
_FLOAT16 = "serve it in bfloat16, or quantize these rows again"
_BLOCK_CODES = 1 << 22
"""Codes looked at together."""
_FIRST_CODES = 16
"""Codes of a row that are compared before the whole row is."""

Tell = Callable[[Severity, str, Tensor, str, str], None]


def audit_qweight(
    name: str, qweight: QWeight, column_scales: Tensor | None = None
) -> tuple[Finding, ...]:
    """Findings about a linear's integers: scales and zeros [N, nG], column_scales [K] or None.

    Never raises for what the tensors hold. Parts whose shapes do not fit are the only finding.
    """
    misfit = _misfit(name, qweight, column_scales)
    if misfit is not None:
        return (misfit,)
    found: list[Finding] = []

    def tell(severity: Severity, kind: str, where: Tensor, rest: str, mend: str) -> None:
        """A finding about the places that are true in `where`, if any is."""
        count = int(where.sum())
        if count:
            place = [int(index) for index in where.nonzero()[0]]
            problem = f"{kind}: {count} of {where.numel()}, first {place}{rest}"
            found.append(Finding(severity, name, problem, mend, kind, "linear"))

    _audit_scales(qweight, tell)
    _audit_offsets(qweight, tell)
    if column_scales is not None:
        sound = torch.isfinite(column_scales)
        tell("error", "column scales that are NaN or Inf", ~sound, "", _FETCH)
        lost = sound & (column_scales == 0)
        tell("warning", "column scales of 0", lost, ": these columns' weights are lost", _FETCH)
    _audit_rows(qweight, tell)
    return tuple(found)


def audit_scales_when_served(
    name: str, qweight: QWeight, dtype: torch.dtype
) -> tuple[Finding, ...]:
    """What a runtime that holds scales in the model's dtype, as vLLM does, changes in them.

    A note with the largest and mean relative change, a warning where a scale becomes infinite;
    nothing where every scale is kept exactly, or where they are not finite to begin with.
    """
    if not qweight.scales.numel() or not bool(torch.isfinite(qweight.scales).all()):
        return ()
    change = scale_change(qweight, dtype)
    if change.exact:
        return ()
    stored, served = (str(kind).removeprefix("torch.") for kind in (qweight.scales.dtype, dtype))
    kind = f"{stored} scales served in {served}"
    if change.largest == torch.inf:
        largest = float(qweight.scales.abs().max())
        problem = f"{kind}: the largest, {largest:.4g}, becomes infinite"
        return (Finding("warning", name, problem, f"serve it in {stored}", kind, "linear"),)
    share = 100 * change.changed / qweight.scales.numel()
    problem = (
        f"{kind}: {share:.0f}% of them change, by {100 * change.largest:.2g}% of their size at most, "
        f"{100 * change.mean:.2g}% in the mean"
    )
    return (Finding("note", name, problem, f"serve it in {stored} to keep them", kind, "linear"),)


def _audit_scales(qweight: QWeight, tell: Tell) -> None:
    scales = qweight.scales
    sound = torch.isfinite(scales)
    tell("error", "NaN scales", torch.isnan(scales), "", _FETCH)
    tell("error", "infinite scales", torch.isinf(scales), "", _FETCH)
    size = torch.where(sound, scales, 1).float().abs()
    zero, limits = size == 0, torch.finfo(torch.float16)
    small = ~zero & (size < limits.tiny)
    suspects = zero | small
    held = _holding_weights(qweight, suspects) if bool(suspects.any()) else suspects
    tell("warning", "zero scales", zero & held,
         ": the codes there are not zero, but the weights all are", _FETCH)  # fmt: skip
    tell("note", "zero scales of empty groups", zero & ~held,
         ": the weights there are zero anyhow; a runtime that divides by scales makes NaN of them",
         "quantize it again where a runtime cannot take it")  # fmt: skip
    small &= held
    for dtype, mend in (
        (torch.float16, _FLOAT16),
        (torch.bfloat16, "serve it in float32, or quantize these rows again"),
    ):
        gone = small & (size.to(dtype) == 0)
        word = str(dtype).removeprefix("torch.")
        tell("warning", f"scales that become 0 in {word}", gone,
             f": served in it, the weights there are lost{_least(size, gone)}", mend)  # fmt: skip
    subnormal = small & (size.half() != 0)
    tell("warning", "scales that are subnormal in float16", subnormal,
         f": below {limits.tiny:.3g} float16 keeps fewer than its 11 bits{_least(size, subnormal)}",
         _FLOAT16)  # fmt: skip
    large = size > limits.max
    tell("warning", "scales beyond float16", large,
         f": above {limits.max:g}, infinite where it is served in float16",
         "serve it in bfloat16")  # fmt: skip
    negative = sound & (scales < 0)
    writer = "; AutoRound writes such" if qweight.scheme.symmetric else ""
    tell("warning", "negative scales", negative,
         f"{writer}: sound, but vLLM's Marlin kernel with int8 activations reads them as unsigned",
         "leave VLLM_MARLIN_INPUT_DTYPE unset there")  # fmt: skip


def _audit_offsets(qweight: QWeight, tell: Tell) -> None:
    """Zeros or minimums."""
    zeros, minimums, top = qweight.zeros, qweight.minimums, qweight.scheme.top_code
    if zeros is not None:
        outside = (zeros < 0) | (zeros > top)
        rest = f", they are {int(zeros.min())}..{int(zeros.max())}, wanted 0..{top}"
        tell("error", "zeros out of range", outside, rest,
             "quantize it again: stored, they would spill into their neighbours")  # fmt: skip
    if minimums is not None:
        sound = torch.isfinite(minimums)
        tell("error", "minimums that are NaN or Inf", ~sound, "", _FETCH)
        large = sound & (minimums.abs() > torch.finfo(torch.float16).max)
        tell("warning", "minimums beyond float16", large, "", "serve it in bfloat16")


def _audit_rows(qweight: QWeight, tell: Tell) -> None:
    """Rows [N, 1] with the same code from end to end."""
    codes = qweight.codes
    same = (codes[:, :_FIRST_CODES] == codes[:, :1]).all(1)
    rows = same.nonzero()[:, 0]
    step = max(1, _BLOCK_CODES // qweight.in_features)
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step]
        same[chunk] = (codes[chunk] == codes[chunk, :1]).all(1)
    tell("note", "rows of one code throughout", same[:, None],
         ": these outputs are constant in every group, zero where the code is the zero point",
         "nothing to mend if the float model has such rows (pruned, or padding)")  # fmt: skip


def _holding_weights(qweight: QWeight, suspects: Tensor) -> Tensor:
    """Of the groups [N, nG] in `suspects`, those with a code that does not stand for zero."""
    holding = torch.zeros_like(suspects)
    groups, column_group = suspects.shape[1], qweight.group_of_column()
    rows = suspects.any(1).nonzero()[:, 0]
    step = max(1, _BLOCK_CODES // qweight.in_features)
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step]
        nothing: Tensor | int = 0 if qweight.minimums is not None else qweight.scheme.midpoint
        if qweight.zeros is not None:
            nothing = qweight.zeros[chunk][:, column_group]
        used = (qweight.codes[chunk] != nothing).int()
        counts = torch.zeros((len(chunk), groups), dtype=torch.int32)
        holding[chunk] = counts.index_add_(1, column_group, used) > 0
    return holding & suspects


def _least(size: Tensor, where: Tensor) -> str:
    """The smallest of the scales in `where`, as a phrase."""
    return f" (least {float(size[where].min()):.2g})" if bool(where.any()) else ""


def _misfit(name: str, qweight: QWeight, column_scales: Tensor | None) -> Finding | None:
    """A part whose dtype or shape does not fit the codes, or None."""

    def misfit(problem: str) -> Finding:
        return Finding("error", name, problem, _CONFIG, "wrong dtype or shape", "linear")

    codes, scales, order = qweight.codes, qweight.scales, qweight.g_idx
    if codes.dtype != torch.uint8 or codes.ndim != 2 or not codes.numel():
        return misfit(f"codes are {codes.dtype} {tuple(codes.shape)}, wanted torch.uint8 [N, K]")
    n, k = codes.shape
    try:
        groups = scales.shape[-1] if scales.ndim and order is not None else qweight.scheme.groups(k)
    except BadRequest as error:
        return misfit(str(error))
    parts = {"scales": scales, "zeros": qweight.zeros, "minimums": qweight.minimums}
    for part, values in parts.items():
        if values is None:
            continue
        if tuple(values.shape) != (n, groups) or not groups:
            return misfit(f"{part} have shape {tuple(values.shape)}, wanted {(n, groups)}")
        if values.is_floating_point() != (part != "zeros") or values.is_complex():
            return misfit(f"{part} are {values.dtype}")
    if order is not None and (
        tuple(order.shape) != (k,)
        or order.is_floating_point()
        or int(order.min()) < 0
        or int(order.max()) >= groups
    ):
        return misfit(f"g_idx {tuple(order.shape)} does not name {groups} groups for {k} columns")
    if column_scales is not None and (
        tuple(column_scales.shape) != (k,) or not column_scales.is_floating_point()
    ):
        found = f"{column_scales.dtype} {tuple(column_scales.shape)}"
        return misfit(f"column scales are {found}, wanted floats ({k},)")
    return None
