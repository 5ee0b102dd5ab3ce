"""What `weightpath convert` makes of a checkpoint, by its records alone.

    compressed-tensors  the same bits and groups, zero points where the source has them
    awq                 up to 4 bits in 4-bit fields with zero points, one group size; others float
    gptq                2, 3, 4 or 8 bits, a column order kept
    gguf                blocks of 32 that hold the codes; others F16
    int8                per output channel, quantized again unless it is that already

The twin of the choices in jobs/targets.py, which see tensors; used to find the conversion that a
runtime loads, and never to make one.
"""

from __future__ import annotations

from dataclasses import replace

from weightpath.paths.held import Held, HeldLinear
from weightpath.scheme import GROUP_SIZES, INT8, PER_CHANNEL, Scheme

TARGETS = ("compressed-tensors", "awq", "gptq", "gguf", "int8")
GGUF_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures whose GGUF weightpath writes: those of checkpoints/gguf_config.py."""
_BLOCK = 32
_PACKED = "compressed-tensors pack-quantized"
_METHOD: dict[str, object] = {"quant_method": "compressed-tensors"}


def after_convert(held: Held, target: str) -> tuple[Held, bool | None] | str:
    """The checkpoint that `--to target` writes, and whether it keeps every weight of the linears.

    None: it depends on their values (a fold, a scale that fp16 rounds). A sentence where it cannot
    be written.
    """
    if target == "compressed-tensors":
        return _compressed(held)
    if target == "awq":
        return _awq(held)
    if target == "gptq":
        return _gptq(held)
    if target == "gguf":
        return _gguf(held)
    return _int8(held)


def _compressed(held: Held) -> tuple[Held, bool | None] | str:
    if not held.linears:
        return "there is no low-bit linear to convert"
    fitted = [_fit(linear) for linear in held.linears]
    return _written(
        held, _PACKED, _METHOD, [linear for linear, _ in fitted], [kept for _, kept in fitted]
    )


def _awq(held: Held) -> tuple[Held, bool | None] | str:
    fitted = [(*_fit(linear), linear) for linear in held.linears]
    four = [
        (linear, kept, old)
        for linear, kept, old in fitted
        if linear.scheme is not None and linear.scheme.bits <= 4 and linear.shape[0] % 8 == 0
    ]
    if not four:
        return "no linear has 4 bits or fewer, which is what AWQ holds"
    whole = all(_group(linear) == PER_CHANNEL for linear, _, _ in four)
    base = PER_CHANNEL if whole else min(_columns(linear) for linear, _, _ in four)
    written, kept_all = [], []
    for linear, kept, old in four:
        if base != PER_CHANNEL and _columns(linear) % base:
            kept_all.append(None)  # stored as floats
            continue
        chosen = replace(linear, scheme=Scheme(4, base, symmetric=False), scale_dtype="float16")
        written.append(chosen)
        kept_all.append(kept if old.scale_dtype == "float16" else kept and None)
    if len(four) < len(fitted):
        kept_all.append(None)
    settings = {"quant_method": "awq", "bits": 4, "group_size": base, "zero_point": True}
    return _written(held, "AWQ gemm", settings, written, kept_all)


def _gptq(held: Held) -> tuple[Held, bool | None] | str:
    written, kept_all = [], []
    for old in held.linears:
        linear, kept = _fit(old, ordered_ok=True)
        assert linear.scheme is not None
        n, k = linear.shape
        bits = next((bits for bits in (2, 3, 4, 8) if bits >= linear.scheme.bits), 8)
        if not linear.scheme.symmetric and bits == linear.scheme.bits:
            kept = kept and None  # a zero point of 0 has no field in v1
        if n % 32 or k % 32:
            kept_all.append(None)  # stored as floats
            continue
        chosen = replace(linear, scheme=replace(linear.scheme, bits=bits), scale_dtype="float16")
        written.append(chosen)
        kept_all.append(kept if old.scale_dtype == "float16" else kept and None)
    if not written:
        return "GPTQ takes shapes in multiples of 32"
    base, *others = dict.fromkeys(linear.scheme for linear in written if linear.scheme is not None)
    settings = _gptq_keys(base) | {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "desc_act": any(linear.ordered for linear in written),
        "dynamic": {f"+:{index}": _gptq_keys(scheme) for index, scheme in enumerate(others)},
    }
    return _written(held, "GPTQ v1", settings, written, kept_all)


def _gguf(held: Held) -> tuple[Held, bool | None] | str:
    if held.architecture not in GGUF_CLASSES:
        known = ", ".join(GGUF_CLASSES)
        return f"weightpath writes GGUF for {known}, not {held.architecture or 'this model'}"
    kinds, written = [], []
    kept_all: list[bool | None] = [] if held.linears else [None]  # floats become F16
    for old in held.linears:
        linear, kept = _fit(old, minimums_ok=True)
        assert linear.scheme is not None
        kind = block_kind(linear.scheme, linear.shape[1])
        if kind is None:
            kept_all.append(None)  # stored as F16
            continue
        kinds.append(kind)
        written.append(replace(linear, scale_dtype="float16"))
        exact = linear.scheme.symmetric and old.scale_dtype == "float16"
        kept_all.append(kept if exact else kept and None)
    blocks = ", ".join(dict.fromkeys(kinds)) or "F16"
    return _written(held, f"GGUF {blocks}", {}, written, kept_all)


def block_kind(scheme: Scheme, in_features: int) -> str | None:
    """The GGUF block that holds codes of a scheme as they are, or None (gguf_blocks.block_type)."""
    size = in_features if scheme.group_size == PER_CHANNEL else scheme.group_size
    if in_features % _BLOCK or size % _BLOCK:
        return None
    if scheme.symmetric:
        return "Q4_0" if scheme.bits <= 4 else "Q5_0" if scheme.bits == 5 else "Q8_0"
    return "Q4_1" if scheme.bits <= 4 else "Q5_1" if scheme.bits == 5 else None


def _int8(held: Held) -> tuple[Held, bool | None] | str:
    if not held.linears:
        return "there is no low-bit linear to convert"
    already: list[bool | None] = [linear.plain and _per_channel(linear) for linear in held.linears]
    written = [
        replace(_plain(linear), scheme=INT8, scale_dtype="float32") for linear in held.linears
    ]
    return _written(held, _PACKED, _METHOD, written, already)


def _fit(
    linear: HeldLinear, ordered_ok: bool = False, minimums_ok: bool = False
) -> tuple[HeldLinear, bool | None]:
    """A linear as integers that a format without orders and minimums holds; is it kept exactly."""
    k = linear.shape[1]
    if linear.scheme is None:
        return replace(_plain(linear), scheme=Scheme(4, _dividing(k), symmetric=False),
                       scale_dtype=_half(linear)), False  # fmt: skip
    if linear.column_scales:  # folded into a norm or rows, which rounds, or quantized again
        return replace(_plain(linear), scale_dtype=_half(linear)), None
    if linear.ordered and not (ordered_ok and linear.scheme.divides(k)):
        return _plain(linear), False if ordered_ok else None
    if linear.minimums and not minimums_ok:
        return replace(linear, minimums=False), None
    return linear, True


def _plain(linear: HeldLinear) -> HeldLinear:
    scheme = linear.scheme
    if scheme is not None and not scheme.divides(linear.shape[1]):
        scheme = replace(scheme, group_size=_dividing(linear.shape[1]))
    return replace(linear, scheme=scheme, ordered=False, minimums=False, column_scales=False)


def _written(
    held: Held,
    form: str,
    settings: dict[str, object],
    linears: list[HeldLinear],
    kept: list[bool | None],
) -> tuple[Held, bool | None]:
    lossless = False if False in kept else None if None in kept else True
    after = Held(
        form, tuple(linears), settings, held.dtype, held.architecture, no_model=held.no_model,
        no_place=held.no_place,
    )  # fmt: skip
    return after, lossless


def _gptq_keys(scheme: Scheme) -> dict[str, object]:
    return {"bits": scheme.bits, "group_size": scheme.group_size, "sym": scheme.symmetric}


def _group(linear: HeldLinear) -> int:
    assert linear.scheme is not None
    return linear.scheme.group_size


def _per_channel(linear: HeldLinear) -> bool:
    """Whether it is symmetric with one group a row, which int8 fields hold whatever the bits."""
    scheme = linear.scheme
    whole = scheme is not None and scheme.group_size in (PER_CHANNEL, linear.shape[1])
    return whole and scheme is not None and scheme.symmetric


def _columns(linear: HeldLinear) -> int:
    """Columns of a group."""
    return linear.shape[1] if _group(linear) == PER_CHANNEL else _group(linear)


def _dividing(in_features: int) -> int:
    """The largest of 64, 32 and 16 that divides K, else whole rows."""
    sizes = (*(size for size in GROUP_SIZES if size <= 64), 16)
    return next((size for size in sizes if in_features % size == 0), PER_CHANNEL)


def _half(linear: HeldLinear) -> str:
    return "float16" if linear.scale_dtype == "float32" else linear.scale_dtype
