"""Which linears tensor parallelism cannot split, as vLLM splits them.

    column parallel  N rows shared out: q, k, v, gate, up, the head    N / tp whole, in whole words
    row parallel     K columns shared out: o, down                     K / tp whole groups and words

A word of packed codes or zeros belongs to one shard, and so does a group with its scale (vllm#5675:
intermediate 192 in groups of 64, tp 2, gives 96 columns). Query heads are shared out whole; of
fewer key/value heads than shards each shard holds a copy of one; a vocabulary is padded to a
multiple of 64. A per-channel scale is copied to every shard. Source: vLLM 0.32.0 (layers/linear.py,
vocab_parallel_embedding.py, parameter.py, distributed/utils.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from weightpath.paths.held import HeldLinear
from weightpath.scheme import GROUP_SIZES, PER_CHANNEL, Scheme

Parallel = Literal["column", "row", "replicated", "unknown"]

QUERY = ("q_proj",)
KEY_VALUE = ("k_proj", "v_proj")
COLUMN = ("gate_proj", "up_proj", "gate_up_proj", "fc1", "w1", "w3")
ROW = ("o_proj", "down_proj", "out_proj", "fc2", "w2")
REPLICATED = ("gate", "router", "shared_expert_gate")
"""Last parts of modules' names, by how vLLM's models split them."""
PADDED_VOCABULARY = 64
PACKED = "compressed-tensors pack-quantized"
COMPRESSED = "weightpath convert --to compressed-tensors"
_WORD_BITS = 32


@dataclass(frozen=True)
class Split:
    """One linear under one tp. problem: why it cannot be split, "" where it can; mend: what helps.

    parallel "unknown": the name tells neither rows nor columns, so nothing was asked.
    """

    name: str
    tp: int
    parallel: Parallel
    problem: str = ""
    mend: str = ""


def splits(
    linears: Iterable[HeldLinear],
    format_name: str,
    tp: int,
    heads: int | None = None,
    kv_heads: int | None = None,
) -> tuple[Split, ...]:
    """How every linear is split over `tp` shards, with what stands in the way.

    format_name: as in Held, which decides along which side words are packed. heads, kv_heads: of
    attention, from config.json; None leaves whole heads unasked.
    """
    made = []
    for linear in linears:
        parallel = parallel_of(linear)

        def problem(shards: int, form: str = format_name, linear: HeldLinear = linear) -> str:
            return _problem(linear, form, shards, heads, kv_heads)

        found = problem(tp)
        mend = _mend(linear, parallel, format_name, tp, problem) if found else ""
        made.append(Split(linear.name, tp, parallel, found, mend))
    return tuple(made)


def parallel_of(linear: HeldLinear) -> Parallel:
    """How vLLM splits a linear, by the last part of its name."""
    leaf = linear.name.rpartition(".")[2]
    if linear.role == "head" or leaf in (*QUERY, *KEY_VALUE, *COLUMN):
        return "column"
    if leaf in ROW:
        return "row"
    return "replicated" if leaf in REPLICATED else "unknown"


def _problem(
    linear: HeldLinear, format_name: str, tp: int, heads: int | None, kv_heads: int | None
) -> str:
    """Why `tp` shards cannot share a linear out, or ""."""
    parallel = parallel_of(linear)
    if tp == 1 or parallel not in ("column", "row"):
        return ""
    if parallel == "row":
        return _row_problem(linear, format_name, tp)
    n = linear.shape[0]
    leaf = linear.name.rpartition(".")[2]
    shards = tp
    if leaf in QUERY and heads is not None and heads % tp:
        return f"{heads} query heads cannot be shared out to {tp}"
    if leaf in KEY_VALUE and kv_heads is not None:
        many, few = max(kv_heads, tp), min(kv_heads, tp)
        if many % few:
            return f"{kv_heads} key/value heads cannot be shared out to {tp}"
        shards = few  # fewer heads than shards: each holds a copy of one
    if linear.role == "head":
        n += -n % PADDED_VOCABULARY
    if n % shards:
        return f"out_features {n} is not a multiple of {shards}"
    words = _rows_of_word(linear.scheme, format_name)
    if n // shards % words:
        return (
            f"a shard of {n // shards} rows ends within a word, which packs {words} of them "
            f"({format_name})"
        )
    return ""


def _row_problem(linear: HeldLinear, format_name: str, tp: int) -> str:
    k, scheme = linear.shape[1], linear.scheme
    if linear.ordered:
        return "its columns have an order of their own (g_idx), so every shard needs every group"
    if k % tp:
        return f"in_features {k} is not a multiple of {tp}"
    shard = k // tp
    if scheme is None:
        return ""
    size = scheme.group_size
    if size != PER_CHANNEL and shard % size:
        return f"a group of {size} straddles shards of {k} / {tp} = {shard} columns"
    block = _columns_of_block(scheme, format_name)
    if shard % block:
        return f"a shard of {shard} columns ends within a block of {block} ({format_name})"
    return ""


def _mend(
    linear: HeldLinear,
    parallel: Parallel,
    format_name: str,
    tp: int,
    problem: Callable[..., str],
) -> str:
    """What helps: a smaller group, padding, another tp."""
    ways = []
    k, scheme = linear.shape[1], linear.scheme
    if linear.ordered and parallel == "row":
        ways.append(f"{COMPRESSED}, which folds its order into the layer before or quantizes again")
    elif parallel == "row" and scheme is not None and k % tp == 0:
        ways.extend(_smaller_group(scheme, k // tp))
    if linear.name.rpartition(".")[2] == "down_proj" and scheme is not None and not linear.ordered:
        unit = _padding_unit(linear, format_name) * tp
        padded = k + -k % unit
        if padded != k:
            ways.append(f"pad intermediate_size from {k} to {padded}")
    if parallel == "column" and _rows_of_word(scheme, format_name) > 1 and _symmetric(linear):
        after = f"{COMPRESSED}: its symmetric codes are packed along in_features alone"
        if not problem(tp, PACKED):
            ways.append(after)
    fits = [shards for shards in range(tp - 1, 1, -1) if tp % shards == 0 and not problem(shards)]
    ways.append(f"use tp {fits[0]}" if fits else "use tp 1")
    return ", or ".join(ways)


def _symmetric(linear: HeldLinear) -> bool:
    return linear.plain and linear.scheme is not None and linear.scheme.symmetric


def _smaller_group(scheme: Scheme, shard: int) -> list[str]:
    """The largest smaller group that tiles a shard; cutting an existing one into it is exact."""
    size = scheme.group_size
    if size == PER_CHANNEL or shard % size == 0:
        return []
    for smaller in GROUP_SIZES:
        if smaller < size and shard % smaller == 0:
            if size % smaller == 0:
                return [
                    f"{COMPRESSED} --group-size {smaller}, which cuts its groups of {size} exactly: "
                    f"every scale (and zero point) is repeated {size // smaller} times"
                ]
            return [f"quantize it again in groups of {smaller}"]
    return ["quantize it again per output channel"]


def _padding_unit(linear: HeldLinear, format_name: str) -> int:
    """Columns that a shard must hold a multiple of: a group and a word or block."""
    assert linear.scheme is not None
    size = linear.scheme.group_size
    block = _columns_of_block(linear.scheme, format_name)
    if size == PER_CHANNEL:
        return block
    unit = size
    while unit % block:
        unit += size
    return unit


def _rows_of_word(scheme: Scheme | None, format_name: str) -> int:
    """Rows whose codes or zeros share a word packed along N: 1 where nothing is packed so.

    AWQ gemm packs codes and zeros along N; GPTQ and compressed-tensors zeros alone, which GPTQ
    stores even where they are all the midpoint.
    """
    if scheme is None:
        return 1
    along_rows = (
        format_name.startswith(("AWQ", "GPTQ", "AutoRound"))
        or (format_name.endswith("pack-quantized") and not scheme.symmetric)
    )  # fmt: skip
    return _codes_of_words(scheme.bits) if along_rows else 1


def _columns_of_block(scheme: Scheme, format_name: str) -> int:
    """Columns that are stored together along K: a word of codes, or a GGUF block."""
    if format_name.startswith("GGUF"):
        return 256 if "_K" in format_name else 32
    if format_name.startswith("AWQ gemm") or format_name in ("AutoRound (awq)",):
        return 1
    if format_name.endswith("int-quantized"):
        return 1
    return _codes_of_words(scheme.bits)


def _codes_of_words(bits: int) -> int:
    """The fewest codes that fill whole 32-bit words: 8 of 4 bits, 32 of 3 bits."""
    codes = _WORD_BITS
    while codes % 2 == 0 and codes // 2 * bits % _WORD_BITS == 0:
        codes //= 2
    return codes
