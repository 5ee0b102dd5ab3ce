"""Bytes of a model's weights under a plan: what is stored, and what one decode step reads.

    resident   every stored tensor, as it is in the file
    a step     linears + head + experts that the step's tokens go to + the rest, and one row of the
               embedding (and of each other table) a token

Towers (vision, audio, an encoder) are resident and read by no decode step. With E experts of which
each token takes k, S sequences touch E (1 - (1 - k/E)^S) of them on average, if tokens choose
independently and evenly; one sequence touches k.

Stored bytes of a linear [N, K], b bits, nG groups a row:

    compressed-tensors   as tensors.py says, + 16 for the shape
    awq                  4 K N/8 + nG (4 N/8 + 2 N)                    4 bits, N % 8 == 0
    gptq, gptq_v2        4 N words(K b) + nG (4 words(N b) + 2 N) + 4 K     N and K % 32 == 0
    gguf                 N K/32 * 18, 20, 22, 24 or 34                 Q4_0, Q4_1, Q5_0, Q5_1, Q8_0

words(x) = ceil(x / 32). A linear that a format cannot hold stays float. GGUF stores vectors as
fp32 and pads each tensor to 32 bytes, which is left out here: at most 31 bytes a tensor.
The layouts are those of checkpoints/; the tests compare with the files that are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from weightpath.errors import BadRequest
from weightpath.paths.kv_budget import KVBudget
from weightpath.paths.tensors import (
    DTYPE_BYTES,
    WEIGHT_SHAPE_BYTES,
    LinearShape,
    ModelShapes,
    TensorPlan,
    stored_bytes,
)
from weightpath.scheme import INT8, PER_CHANNEL, Scheme

FORMATS = ("compressed-tensors", "awq", "gptq", "gptq_v2", "int8", "gguf")
TOWERS = (
    "vision", "visual", "audio", "speech", "image", "encoder", "projector", "tower",
)  # fmt: skip
"""Parts of a module's name that mark what runs once a prompt, not at every token."""
_BLOCK = 32
_BLOCK_BYTES = {(4, True): 18, (4, False): 20, (5, True): 22, (5, False): 24, (8, True): 34}
_GPTQ_BITS = (2, 3, 4, 8)


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of one model in one format, by what they are for.

    linears and head: multiplied at every step. towers: linears that no decode step reads. experts:
    all of them. embedding: the input table, 0 where the head is tied to it and counts it. tables:
    other looked-up tables. rows: one row of the embedding and of each table. other: norms, biases,
    convolutions, routers.
    """

    format: str
    linears: int
    head: int
    towers: int
    experts: int
    embedding: int
    tables: int
    other: int
    rows: int
    expert_count: int = 0
    experts_per_token: int = 0

    @property
    def resident_bytes(self) -> int:
        """Every stored tensor."""
        return (
            self.linears + self.head + self.towers + self.experts + self.embedding + self.tables
            + self.other
        )  # fmt: skip

    def experts_touched(self, sequences: int = 1) -> float:
        """Experts of a layer that one step of `sequences` tokens reads, on average."""
        count, each = self.expert_count, self.experts_per_token
        if not count or each >= count:
            return float(count)
        return count * (1 - (1 - each / count) ** sequences)

    def step_bytes(self, sequences: int = 1) -> int:
        """Weights that one decode step of `sequences` tokens reads; the cache is not in it."""
        share = self.experts_touched(sequences) / self.expert_count if self.expert_count else 0.0
        always = self.linears + self.head + self.other + self.rows * sequences
        return always + round(self.experts * share)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the two totals."""
        return asdict(self) | {
            "resident_bytes": self.resident_bytes, "step_bytes": self.step_bytes(),
        }  # fmt: skip


def weight_bytes(
    shapes: ModelShapes,
    plan: TensorPlan,
    format: str = "compressed-tensors",
    expert_scheme: Scheme | None = None,
) -> WeightBytes:
    """What the plan's tensors take in a format that weightpath writes.

    expert_scheme: of fused experts; None leaves them float, as weightpath does today. BadRequest
    for another format.
    """
    if format not in FORMATS:
        raise BadRequest(f"format '{format}': unknown; use one of {', '.join(FORMATS)}")
    width = DTYPE_BYTES[shapes.dtype]
    schemes = _fitted(plan, format)
    found = {"linears": 0, "head": 0, "towers": 0, "embedding": 0}
    floats = 0
    rows = 0
    for item in plan.decisions:
        shape = item.shape
        plain = shape.out_features * shape.in_features * width
        floats += plain
        scheme = schemes[item.name]
        size = linear_bytes(shape, scheme, format, shapes.dtype)
        role = shape.role
        if role == "tied_head" and item.scheme is not None:  # untied: the table stays beside it
            found["embedding"] += plain
        if role in ("tied_head", "embedding"):
            rows = max(rows, shape.in_features * width)
        kind = {"linear": "linears", "embedding": "embedding"}.get(role, "head")
        found["towers" if role == "linear" and in_tower(item.name) else kind] += size
    experts = expert_floats = 0
    for fused in shapes.experts:
        each = LinearShape(fused.name, fused.out_features, fused.in_features)
        fit = fitted_scheme(each, expert_scheme, format)
        experts += fused.count * linear_bytes(each, fit, format, shapes.dtype)
        expert_floats += fused.count * each.out_features * each.in_features * width
    tables = sum(table.out_features * table.in_features * width for table in shapes.tables)
    other = shapes.total_bytes - floats - expert_floats - tables
    if format == "gguf":
        other += shapes.vector_elements * (4 - width)
    return WeightBytes(
        format=format, linears=found["linears"], head=found["head"], towers=found["towers"],
        experts=experts, embedding=found["embedding"], tables=tables, other=other,
        rows=rows + sum(table.in_features * width for table in shapes.tables),
        expert_count=max((fused.count for fused in shapes.experts), default=0),
        experts_per_token=shapes.experts_per_token,
    )  # fmt: skip


def decode_step_bytes(weights: WeightBytes, cache: KVBudget | None = None) -> int:
    """What one decode step reads: the weights, and the cache of all of its sequences at their
    context. cache None: the weights for one sequence."""
    if cache is None:
        return weights.step_bytes()
    return weights.step_bytes(cache.sequences) + cache.read_bytes


def linear_bytes(shape: LinearShape, scheme: Scheme | None, format: str, dtype: str) -> int:
    """Bytes of one weight as a format stores it; scheme None: its floats."""
    if scheme is None:
        return shape.out_features * shape.in_features * DTYPE_BYTES[dtype]
    n, k, bits = shape.out_features, shape.in_features, scheme.bits
    groups = scheme.groups(k)
    if format == "awq":
        return 4 * k * (n // 8) + groups * (4 * (n // 8) + 2 * n)
    if format in ("gptq", "gptq_v2"):
        return 4 * n * _words(k * bits) + groups * (4 * _words(n * bits) + 2 * n) + 4 * k
    if format == "gguf":
        return n * (k // _BLOCK) * _BLOCK_BYTES[_block(scheme)]
    return stored_bytes(shape, scheme, dtype) + WEIGHT_SHAPE_BYTES


def fitted_scheme(
    shape: LinearShape, scheme: Scheme | None, format: str, group_size: int | None = None
) -> Scheme | None:
    """What a format makes of a linear's scheme: the scheme it stores, or None where it stays float.

    group_size: the one group size of an AWQ file.
    """
    if scheme is None:
        return None
    n, k = shape.out_features, shape.in_features
    size = k if scheme.group_size == PER_CHANNEL else scheme.group_size
    if format == "int8":
        return INT8
    if format == "awq":
        one = size if group_size is None else group_size
        if scheme.bits > 4 or n % 8 or size % one:
            return None
        return Scheme(4, PER_CHANNEL if one == k else one, symmetric=False)
    if format in ("gptq", "gptq_v2"):
        bits = next((bits for bits in _GPTQ_BITS if bits >= scheme.bits), 8)
        return None if n % 32 or k % 32 else Scheme(bits, scheme.group_size, scheme.symmetric)
    if format == "gguf":
        return None if k % _BLOCK or size % _BLOCK or _block(scheme) not in _BLOCK_BYTES else scheme
    return scheme


def in_tower(name: str) -> bool:
    """Whether a module belongs to a part that a decode step does not run."""
    return any(word in part for part in name.split(".")[:-1] for word in TOWERS)


def _fitted(plan: TensorPlan, format: str) -> Mapping[str, Scheme | None]:
    """Every decision's scheme as the format stores it."""
    group = None
    if format == "awq":  # the smallest group of the linears that it can hold
        sizes = [
            item.shape.in_features
            if item.scheme.group_size == PER_CHANNEL
            else item.scheme.group_size
            for item in plan.decisions
            if item.scheme is not None
            and item.scheme.bits <= 4
            and item.shape.out_features % 8 == 0
        ]
        group = min(sizes, default=None)
    return {
        item.name: fitted_scheme(item.shape, item.scheme, format, group) for item in plan.decisions
    }


def _block(scheme: Scheme) -> tuple[int, bool]:
    """The GGUF block type of a scheme, as (bits of its field, symmetric)."""
    bits = 4 if scheme.bits <= 4 else 5 if scheme.bits == 5 else 8
    return bits, scheme.symmetric


def _words(bits: int) -> int:
    return -(-bits // 32)
