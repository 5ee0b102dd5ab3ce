"""Whether a model with its context and sequences fits a device's memory, and what context would.

    needed = weights + KV cache and states + activations + runtime + margin

weights: resident bytes (weight_bytes.py). KV: kv_budget.py. activations: of the tokens that one
step takes, an upper bound,

    rows * (8 hidden + 3 widest) * 4 + sequences * vocabulary * 4

with `widest` the widest side of a linear but the head's. On SmolLM2-135M a prompt of 2,048 tokens
took 68 MB of activations in transformers (bf16), where this says 75 MB; the native engine, which
takes pieces, 7 MB. runtime: RssAnon of an interpreter with torch, transformers and the engine
loaded, 262 MB measured (torch 2.13, CPU); on a GPU 600 MB for the CUDA context and libraries,
assumed and not measured. margin: a tenth of the rest, for allocators, which round up (the native
engine's 142 MB of weights took 166 MB).

Memory is what is available now on a CPU (cgroup limits honoured), and a GPU's whole memory, of
which engines take nine tenths at most. A profile that does not know it leaves `fits` None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from weightpath.device.profile import HardwareProfile, hardware_class
from weightpath.paths.tensors import ModelShapes

CPU_RUNTIME = 270_000_000
GPU_RUNTIME = 600_000_000
MARGIN = 0.1
GPU_SHARE = 0.9
STEP_TOKENS = 2048
"""Tokens of a prompt that one step takes: what engines cut prompts into, or more."""


@dataclass(frozen=True)
class MemoryFit:
    """What is needed against what there is; bytes.

    where: "RAM" or "GPU memory". memory: usable, 0 where unknown. fits: None where unknown.
    largest_context: of the same sequences, 0 where none fits, None where it is unknown.
    """

    where: str
    memory: int
    weights: int
    kv: int
    activations: int
    runtime: int
    margin: int
    context: int
    sequences: int
    kv_dtype: str
    largest_context: int | None = None

    @property
    def needed(self) -> int:
        """The sum."""
        return self.weights + self.kv + self.activations + self.runtime + self.margin

    @property
    def fits(self) -> bool | None:
        """Whether the sum is within the memory; None where that is unknown."""
        return None if not self.memory else self.needed <= self.memory

    @property
    def sentence(self) -> str:
        """The verdict with its numbers, and the mend where it does not fit."""
        parts = (
            f"needs {_gb(self.needed)} for {self.sequences} x {self.context:,} tokens (weights "
            f"{_gb(self.weights)}, KV in {self.kv_dtype} {_gb(self.kv)}, activations "
            f"{_gb(self.activations)}, runtime {_gb(self.runtime)}, margin {_gb(self.margin)})"
        )
        if self.fits is None:
            return f"{parts}; this device's {self.where} is unknown"
        if self.fits:
            more = f"; up to {self.largest_context:,} tokens would" if self.largest_context else ""
            return f"fits: {parts}, of {_gb(self.memory)} {self.where}{more}"
        missing = f"does not fit: {parts}, of {_gb(self.memory)} {self.where}"
        if self.largest_context:
            return f"{missing}; at most {self.largest_context:,} tokens of context do"
        return f"{missing}; no context does: use fewer bits, fewer sequences or another device"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the verdict."""
        return asdict(self) | {
            "needed": self.needed, "fits": self.fits, "sentence": self.sentence,
        }  # fmt: skip


def memory_of(profile: HardwareProfile) -> tuple[int, str]:
    """Usable bytes for a model, and their name: a discrete GPU's memory, or the RAM available.

    A Jetson's GPU shares the RAM, so the smaller of the two known figures counts. 0 is unknown.
    """
    group = hardware_class(profile)
    if group == "cuda_discrete":
        return int(profile.gpu_memory * GPU_SHARE), "GPU memory"
    ram = profile.ram_available or profile.ram_total
    if group == "jetson" and profile.gpu_memory:
        return min(ram or profile.gpu_memory, profile.gpu_memory), "memory shared with the GPU"
    return ram, "RAM available"


def activation_bytes(shapes: ModelShapes, rows: int, sequences: int) -> int:
    """Upper bound for one step of `rows` tokens (the formula above); fp32 throughout."""
    inner = [s for s in shapes.linears if s.role == "linear"]
    widest = max((max(s.out_features, s.in_features) for s in inner), default=0)
    tables = [s for s in shapes.linears if s.role != "linear"]
    hidden = max((s.in_features for s in tables), default=widest)
    vocabulary = max((s.out_features for s in tables), default=0)
    return rows * (8 * hidden + 3 * widest) * 4 + sequences * vocabulary * 4


def memory_fit(
    profile: HardwareProfile,
    shapes: ModelShapes,
    weights: int,
    kv_of: Callable[[int], int],
    context: int,
    sequences: int = 1,
    kv_dtype: str = "bf16",
    longest: int | None = None,
) -> MemoryFit:
    """The fit of `weights` resident bytes with the KV cache that `kv_of(context)` says.

    kv_of: bytes of all sequences at a context; it may not fall as the context grows. longest: the
    context that the model was made for, up to which the largest that fits is looked for.
    """
    memory, where = memory_of(profile)
    gpu = hardware_class(profile) in ("cuda_discrete", "jetson")
    runtime = GPU_RUNTIME if gpu else CPU_RUNTIME

    def at(tokens: int, largest: int | None = None) -> MemoryFit:
        kv = kv_of(tokens)
        rows = min(tokens * sequences, STEP_TOKENS)
        activations = activation_bytes(shapes, rows, sequences)
        margin = round(MARGIN * (weights + kv + activations))
        return MemoryFit(where, memory, weights, kv, activations, runtime, margin, tokens,
                         sequences, kv_dtype, largest)  # fmt: skip

    if not memory:
        return at(context)
    most = max(longest or context, context)
    return at(context, _largest(lambda tokens: bool(at(tokens).fits), most))


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest of 1..most that fits, 0 for none, where fitting never comes back once lost."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 10_000_000 else f"{count / 1e6:.1f} MB"
