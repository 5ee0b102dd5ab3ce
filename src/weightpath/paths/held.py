"""What a checkpoint holds, as plain records that the acceptance table is worked out from.

Nothing here opens a file: whoever opened the checkpoint fills a Held, and `acceptance.accepts` says
which runtimes load it. An Answer is one runtime's; a Verdict is a row of the table, with the
`weightpath convert` that would make the file load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from weightpath.scheme import Scheme

Loads = Literal["yes", "no", "wrong"]
"""yes: opens and computes what the file says; no: refuses it; wrong: opens and computes garbage."""


@dataclass(frozen=True)
class HeldLinear:
    """One low-bit linear [N, K] as it was read.

    scheme: of its integers, symmetric only where the stored zeros are the midpoint; None where only
    floats stand for it (nf4, HQQ across rows). role: "linear" or "head". ordered: a g_idx other
    than k // group_size. minimums: float offsets instead of whole zero points. column_scales:
    activations are to be multiplied by factors of their own. scale_dtype: of the stored scales.
    """

    name: str
    scheme: Scheme | None
    shape: tuple[int, int]
    role: str = "linear"
    ordered: bool = False
    minimums: bool = False
    column_scales: bool = False
    scale_dtype: str = "float16"

    @property
    def plain(self) -> bool:
        """Whether codes, scales and whole zero points in column order are all there is to it."""
        return self.scheme is not None and not (self.ordered or self.minimums or self.column_scales)


@dataclass(frozen=True)
class Held:
    """A checkpoint.

    format: "AWQ gemm" (gemv, gemv_fast, llm-awq), "GPTQ v1" or "GPTQ v2" (as the stored zeros are),
    "AutoRound (gptq)" (gptq_v2, awq, compressed-tensors), "compressed-tensors pack-quantized" or
    "compressed-tensors int-quantized", "torchao", "ModelOpt", "bitsandbytes", "HQQ", "GGUF ..."
    with its block types, or "float". settings: the quantization config as found, {} without one.
    linears: the low-bit ones. dtype: the model's, as config.json says. architecture: its
    architectures[0]. contradictions: where a label and the data disagree, a sentence each.
    padded_words: 3-, 5-, 6- or 7-bit codes in words padded to whole codes. config_missing:
    config.json has no quantization config. nested: it is in a section such as text_config.
    no_model: why transformers makes no model of config.json (an architecture that it does not
    know), as a clause, or "". no_place: tensors and packed linears that this model has no place for.
    no_zeros: AWQ linears without qzeros, as zero_point false allows.
    """

    format: str
    linears: tuple[HeldLinear, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"
    architecture: str = "LlamaForCausalLM"
    contradictions: tuple[str, ...] = ()
    padded_words: bool = False
    config_missing: bool = False
    nested: bool = False
    no_model: str = ""
    no_place: tuple[str, ...] = ()
    no_zeros: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What one runtime does with a checkpoint, why, and what it needs beside itself."""

    loads: Loads
    why: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """A row of the acceptance table.

    versions: of the runtime, as a phrase. device: "CUDA", "CPU", or "" where it does not matter.
    needs: packages, flags or hardware that a yes depends on. convert: arguments of `weightpath
    convert SRC` that make it load, None where there are none (then `why` says so) or none are
    needed. lossless: whether that keeps every weight of the linears; None where it depends on them.
    """

    runtime: str
    versions: str
    device: str
    loads: Loads
    why: str
    needs: tuple[str, ...] = ()
    convert: str | None = None
    lossless: bool | None = None


def named(linears: Iterable[HeldLinear], test: Callable[[HeldLinear], bool]) -> str:
    """The first linear that passes `test` and how many more do: "a.b and 3 more"; "" for none."""
    found = [linear.name for linear in linears if test(linear)]
    if len(found) < 2:
        return found[0] if found else ""
    return f"{found[0]} and {len(found) - 1} more"


def schemes_of(held: Held) -> set[Scheme]:
    """The schemes of the linears that have one."""
    return {linear.scheme for linear in held.linears if linear.scheme is not None}


def asymmetric(held: Held) -> str:
    """Linears whose zeros are not the midpoint, or that have minimums."""
    return named(held.linears, lambda linear: linear.scheme is not None
                 and not linear.scheme.symmetric)  # fmt: skip


def ordered(held: Held) -> str:
    """Linears with a column order of their own."""
    return named(held.linears, lambda linear: linear.ordered)


def scale_rounding(held: Held) -> str:
    """What holding scales in the model's dtype does to them, as a clause; "" for nothing.

    The largest relative error of rounding to nearest: 2**-8 in bf16, 2**-11 in fp16.
    """
    stored = {linear.scale_dtype for linear in held.linears} - {held.dtype}
    if held.dtype == "bfloat16" and stored:
        return f"{' and '.join(sorted(stored))} scales are rounded to bf16, by up to 0.39%"
    if held.dtype == "float16" and "float32" in stored:
        return "float32 scales are rounded to fp16, by up to 0.05%"
    if held.dtype == "float16" and "bfloat16" in stored:
        return "bf16 scales are held in fp16, exact within its range"
    return ""
