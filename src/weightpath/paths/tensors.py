"""What a plan does to each tensor: its scheme, why, and the bytes that follow.

One group size for the whole model: the largest G of 128, 64, 32 that divides every K it applies
to, where K = in_features and a K that none of the three divides does not count. Such a tensor
becomes int8 per output channel instead of dragging the others to smaller groups.

Stored bytes of a linear [N, K] in compressed-tensors `pack-quantized`, b bits, nG groups a row:

    codes   4 N ceil(K b / 32)          int32 words along K
    scales  2 N nG                      model dtype; fp32 (4 N) for int8 per output channel
    zeros   4 nG ceil(N b / 32)         only where asymmetric
    shape   16                          int64 [2], counted in the file and not in bits per weight

An untied head is a new tensor: the embedding that it shared stays as it is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from weightpath.device.profile import HardwareProfile
from weightpath.errors import BadRequest
from weightpath.paths.runtimes import find_runtime, loads
from weightpath.scheme import GROUP_SIZES, INT8, PER_CHANNEL, Scheme

ROLES = ("linear", "head", "tied_head", "embedding")
HEAD_BITS = (16, 8, 4)
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
WEIGHT_SHAPE_BYTES = 16


@dataclass(frozen=True)
class LinearShape:
    """One weight [out_features, in_features] and what it is for.

    role: "linear"; "head", an output projection of its own; "tied_head", one that shares the
    embedding's matrix; "embedding", which is looked up and never multiplied.
    """

    name: str
    out_features: int
    in_features: int
    role: str = "linear"

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise BadRequest(f"{self.name}: role '{self.role}'; use one of {', '.join(ROLES)}")
        if self.out_features < 1 or self.in_features < 1:
            raise BadRequest(
                f"{self.name}: shape [{self.out_features}, {self.in_features}]; give sizes above 0"
            )


@dataclass(frozen=True)
class ExpertShape:
    """`count` experts [out_features, in_features] that a model keeps in one tensor."""

    name: str
    count: int
    out_features: int
    in_features: int


@dataclass(frozen=True)
class ModelShapes:
    """A model's weights by shape. `total_bytes`: its checkpoint's tensors, a tied matrix once.

    experts: fused ones, which are no linears. tables: looked-up tables beside the input embedding.
    vector_elements: numbers in tensors of one dimension.
    """

    linears: tuple[LinearShape, ...]
    tied: bool
    dtype: str  # bfloat16, float16 or float32
    total_bytes: int
    experts: tuple[ExpertShape, ...] = ()
    experts_per_token: int = 0
    tables: tuple[LinearShape, ...] = ()
    vector_elements: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise BadRequest(f"model shapes: dtype '{self.dtype}'; use one of {known}")
        wrong = "head" if self.tied else "tied_head"
        for shape in self.linears:
            if shape.role == wrong:
                state = "tied" if self.tied else "not tied"
                raise BadRequest(f"{shape.name}: role '{wrong}' in a model that is {state}")


@dataclass(frozen=True)
class TensorDecision:
    """What becomes of one weight. scheme None: it stays in the model's dtype."""

    name: str
    scheme: Scheme | None
    reason: str
    shape: LinearShape
    stored_bytes: int  # codes, scales and zeros; the float bytes where it stays


@dataclass(frozen=True)
class TensorPlan:
    """Every decision, the group size with its reason, and the arithmetic of the whole."""

    decisions: tuple[TensorDecision, ...]
    group_size: int | None  # None: no grouped tensor
    group_reason: str
    unties_head: bool
    source_bytes: int
    file_bytes: int  # tensors of the planned file
    file_bits_per_weight: float  # over the weights of the source
    linear_bytes: int
    linear_bits_per_weight: float  # linears alone
    matmul_bits_per_weight: float  # linears and head: what a decode step reads

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready values, schemes by name."""
        decisions = [
            {
                "name": item.name,
                "scheme": None if item.scheme is None else item.scheme.name,
                "reason": item.reason,
                "role": item.shape.role,
                "shape": [item.shape.out_features, item.shape.in_features],
                "stored_bytes": item.stored_bytes,
            }
            for item in self.decisions
        ]
        return asdict(self) | {"decisions": decisions}


def plan_tensors(
    shapes: ModelShapes,
    path_scheme: Scheme | None,
    head_bits: int = 8,
    group_size: int | None = None,
    runtime: str = "weightpath",
    profile: HardwareProfile | None = None,
) -> TensorPlan:
    """Decide the scheme of every linear and of the head, and count what they take.

    path_scheme: the linears' scheme, whose group size is only a wish; None leaves all as it is.
    head_bits: 8 (a tied head is untied), 16 (it stays, and stays tied) or 4 (as the linears).
    group_size: forced, for the tensors that it divides; -1 is per output channel. profile: the
    device that `runtime` would run on; needed for any runtime but weightpath.
    Raises BadRequest where these contradict each other or the model.
    """
    find_runtime(runtime)
    if head_bits not in HEAD_BITS:
        raise BadRequest(f"head of {head_bits} bits: use 16, 8 or 4")
    if profile is None and runtime != "weightpath":
        raise BadRequest(f"runtime {runtime}: what it loads depends on the device; give a profile")
    if path_scheme is not None and path_scheme.bits != 4 and path_scheme != INT8:
        raise BadRequest(
            f"scheme {path_scheme.name}: weightpath makes 4-bit weights and int8 (per output "
            "channel, symmetric); use int8 or a 4-bit scheme such as w4g64"
        )
    if path_scheme == INT8 and head_bits == 4:
        raise BadRequest("head of 4 bits beside int8 linears: use --head 8, or a 4-bit path")
    grouped = [
        shape
        for shape in shapes.linears
        if shape.role == "linear" or (head_bits == 4 and shape.role in ("head", "tied_head"))
    ]
    chosen, why = _choose_group(grouped, path_scheme, group_size)
    scheme = path_scheme
    if path_scheme is not None and chosen is not None:
        scheme = replace(path_scheme, group_size=chosen)
    decisions = []
    for shape in shapes.linears:
        planned, reason = _decide(shape, scheme, head_bits, group_size is not None)
        if planned is not None and profile is not None:
            planned, reason = _bounded(shape, planned, reason, runtime, profile)
        size = stored_bytes(shape, planned, shapes.dtype)
        decisions.append(TensorDecision(shape.name, planned, reason, shape, size))
    return _counted(shapes, tuple(decisions), chosen, why)


def stored_bytes(shape: LinearShape, scheme: Scheme | None, dtype: str) -> int:
    """Bytes of one weight's codes, scales and zeros as stored, or of its floats."""
    n, k = shape.out_features, shape.in_features
    if scheme is None:
        return n * k * DTYPE_BYTES[dtype]
    groups = scheme.groups(k)
    total = 4 * n * _words(k * scheme.bits)
    per_channel_int8 = scheme.bits == 8 and scheme.group_size == PER_CHANNEL
    total += n * groups * (4 if per_channel_int8 else 2)
    return total if scheme.symmetric else total + 4 * groups * _words(n * scheme.bits)


def _words(bits: int) -> int:
    """int32 words that hold so many bits."""
    return -(-bits // 32)


def _choose_group(
    grouped: list[LinearShape], scheme: Scheme | None, forced: int | None
) -> tuple[int | None, str]:
    """The one group size of the model, and the sentence that says which K forced it."""
    columns = sorted({shape.in_features for shape in grouped})
    listed = ", ".join(str(k) for k in columns[:6]) + (", ..." if len(columns) > 6 else "")
    if scheme is None or scheme.bits == 8:
        kept = "the weights stay in the model's dtype" if scheme is None else "int8 per channel"
        if forced is not None and forced != PER_CHANNEL:
            raise BadRequest(f"group size {forced}: {kept}, without groups; choose a 4-bit path")
        return None, f"no groups: {kept}"
    if forced == PER_CHANNEL:
        return PER_CHANNEL, "one group a row, as asked"
    if forced is not None:
        if forced < 1:
            raise BadRequest(f"group size {forced}: use -1 (per channel) or a size above 0")
        if not any(k % forced == 0 for k in columns):
            sizes = ", ".join(str(size) for size in GROUP_SIZES)
            raise BadRequest(
                f"group size {forced}: divides no in_features of this model ({listed}); "
                f"use one of {sizes}, -1, or leave it out"
            )
        return forced, f"groups of {forced}, as asked"
    usable = [k for k in columns if k % GROUP_SIZES[-1] == 0]
    if not usable:
        return None, f"no groups: none of 128, 64, 32 divides an in_features of {listed}"
    size = next(size for size in GROUP_SIZES if all(k % size == 0 for k in usable))
    reason = f"groups of {size}: the largest of 128, 64, 32 that divides every in_features "
    reason += f"({', '.join(str(k) for k in usable[:6])}{', ...' if len(usable) > 6 else ''})"
    if size != GROUP_SIZES[0]:
        larger = GROUP_SIZES[GROUP_SIZES.index(size) - 1]
        forcing = next(
            shape for shape in grouped if shape.in_features in usable and shape.in_features % larger
        )
        reason += f"; {forcing.in_features} ({forcing.name}) is not a multiple of {larger}"
    return size, reason


def _decide(
    shape: LinearShape, scheme: Scheme | None, head_bits: int, forced: bool
) -> tuple[Scheme | None, str]:
    """The scheme of one weight before the runtime has its say, and why."""
    if shape.role == "embedding":
        return None, "an embedding is looked up, not multiplied: it stays in the model's dtype"
    if scheme is None:
        return None, "the path keeps the model's dtype"
    untied = "untied from the embedding: " if shape.role == "tied_head" else ""
    if shape.role != "linear" and head_bits == 16:
        tied = ", tied to the embedding" if untied else ""
        return None, f"the head stays in the model's dtype{tied}, as asked"
    if shape.role != "linear" and head_bits == 8:
        return INT8, f"{untied}the head is int8 per output channel"
    if scheme.bits == 8:
        return INT8, f"{untied}int8 per output channel"
    k = shape.in_features
    if not scheme.divides(k) or (not forced and k % GROUP_SIZES[-1]):
        sizes = str(scheme.group_size) if forced else "128, 64 or 32"
        return INT8, f"{untied}in_features {k} is no multiple of {sizes}: int8 per output channel"
    each = "row" if scheme.group_size == PER_CHANNEL else f"group of {scheme.group_size}"
    return scheme, f"{untied}{scheme.bits}-bit codes with a scale a {each}"


def _bounded(
    shape: LinearShape, planned: Scheme, reason: str, runtime: str, profile: HardwareProfile
) -> tuple[Scheme | None, str]:
    """What the runtime leaves of a decision: the scheme itself, int8, or the model's dtype."""
    role = "linear" if shape.role == "linear" else "head"
    refusal = loads(runtime, planned, role, profile, shape.in_features)
    if refusal is None:
        return planned, reason
    if planned != INT8 and loads(runtime, INT8, role, profile, shape.in_features) is None:
        return INT8, f"int8 per output channel, because {refusal}"
    stays = f"stays in the model's dtype, because {refusal}"
    if role == "head":
        tied = " and tied" if shape.role == "tied_head" else ""
        stays = f"the head stays 16-bit{tied}, because {refusal}"
        four = Scheme(4, GROUP_SIZES[-1])
        if planned == INT8 and loads(runtime, four, role, profile, shape.in_features) is None:
            stays += "; --head 4 makes it a 4-bit head, which loads there"
    return None, stays


def _counted(
    shapes: ModelShapes, decisions: tuple[TensorDecision, ...], group: int | None, why: str
) -> TensorPlan:
    """The plan with its byte arithmetic."""
    width = DTYPE_BYTES[shapes.dtype]
    file_bytes = shapes.total_bytes
    bytes_of = {"linear": 0, "head": 0}
    weights_of = {"linear": 0, "head": 0}
    for item in decisions:
        shape = item.shape
        weights = shape.out_features * shape.in_features
        if item.scheme is not None:
            file_bytes += item.stored_bytes + WEIGHT_SHAPE_BYTES
            file_bytes -= 0 if shape.role == "tied_head" else weights * width
        if shape.role != "embedding":
            kind = "linear" if shape.role == "linear" else "head"
            bytes_of[kind] += item.stored_bytes
            weights_of[kind] += weights
    return TensorPlan(
        decisions=decisions,
        group_size=group,
        group_reason=why,
        unties_head=any(d.shape.role == "tied_head" and d.scheme is not None for d in decisions),
        source_bytes=shapes.total_bytes,
        file_bytes=file_bytes,
        file_bits_per_weight=_ratio(8 * file_bytes * width, shapes.total_bytes),
        linear_bytes=bytes_of["linear"],
        linear_bits_per_weight=_ratio(8 * bytes_of["linear"], weights_of["linear"]),
        matmul_bits_per_weight=_ratio(8 * sum(bytes_of.values()), sum(weights_of.values())),
    )


def _ratio(bits: int, weights: int) -> float:
    return bits / weights if weights else 0.0
