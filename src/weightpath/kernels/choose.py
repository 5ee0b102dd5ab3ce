"""Which kernel multiplies by a low-bit weight, and why not the others.

A kernel is one spec: a name, what it runs, and `can_run`, which answers None for yes or the
sentence that says why not. `choose` walks an ordered tuple, fastest first, and keeps every
rejection. Asking for a kernel by name where it cannot run is an error with that sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from weightpath.errors import BadRequest, CannotRun
from weightpath.kernels import cpu
from weightpath.kernels.cuda import tiles_linear
from weightpath.kernels.triton import available
from weightpath.layouts import cpu_tiles, gpu_tiles
from weightpath.scheme import Scheme


@dataclass(frozen=True)
class Layer:
    """What a kernel is asked to run: out_features, in_features, the scheme, the device, and the
    dtype that the scales have."""

    out_features: int
    in_features: int
    scheme: Scheme
    device: torch.device
    scale_dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Kernel:
    """One kernel and its own word on whether it can run a layer. instruction_set: what of several
    runs it here, and why faster ones do not."""

    name: str
    can_run: Callable[[Layer], str | None]
    instruction_set: Callable[[], tuple[str, tuple[tuple[str, str], ...]]] = lambda: ("", ())


@dataclass(frozen=True)
class Choice:
    """The kernel chosen for a layer, and (name, sentence) for every one passed over before it.

    instruction_set: of a compiled CPU kernel, the one that runs one row, and from how many rows
    another does; "" for other kernels. The faster ones that cannot run are among the rejected.
    """

    name: str
    rejected: tuple[tuple[str, str], ...]
    instruction_set: str = ""


def _on_gpu(layer: Layer) -> str | None:
    """What no GPU kernel takes, as a sentence, or None."""
    if layer.scheme.activation_bits == 8:
        return "8-bit activations; the GPU kernels take bf16 and fp16 ones"
    return gpu_tiles.scheme_refusal(layer.scheme, layer.in_features, layer.scale_dtype)


def _cuda(layer: Layer) -> str | None:
    return tiles_linear.refusal(layer.device) or _on_gpu(layer)


def _triton(layer: Layer) -> str | None:
    if layer.device.type != "cuda":
        return f"the Triton kernels run on CUDA; this layer is on {layer.device.type}"
    return available.refusal(layer.device) or _on_gpu(layer)


def _cpu(layer: Layer) -> str | None:
    if layer.device.type != "cpu":
        return f"the compiled CPU kernels read memory of the CPU; this layer is on {layer.device}"
    if layer.scheme.bits == 4 and layer.in_features % 2:
        return f"in_features {layer.in_features} is odd; 4-bit codes are packed in pairs"
    return cpu.refusal() or cpu_tiles.scheme_refusal(
        layer.scheme, layer.in_features, layer.scale_dtype
    )


def _torch(layer: Layer) -> str | None:
    if not layer.scheme.divides(layer.in_features):
        return (
            f"group size {layer.scheme.group_size} does not divide in_features {layer.in_features}"
        )
    if (
        layer.scheme.bits == 8
        and layer.scheme.symmetric
        and layer.scheme.groups(layer.in_features) == 1
    ):
        return None
    if layer.scheme.bits != 4:
        return f"the torch kernels take 4-bit groups or int8 per channel, not {layer.scheme.name}"
    if layer.in_features % 2:
        return f"in_features {layer.in_features} is odd; 4-bit codes are packed in pairs"
    return None


KERNELS: tuple[Kernel, ...] = (
    Kernel("cuda", _cuda),
    Kernel("triton", _triton),
    Kernel("cpu", _cpu, cpu.instruction_set_here),
    Kernel("torch", _torch),
)


def choose(layer: Layer, wanted: str | None = None) -> Choice:
    """The first kernel that can run `layer`, or the one `wanted` by name.

    Raises BadRequest for an unknown name, CannotRun with the kernel's own sentence when the
    wanted one, or every one, declines.
    """
    names = [kernel.name for kernel in KERNELS]
    if wanted is not None and wanted not in names:
        raise BadRequest(f"backend '{wanted}': unknown; the backends are {', '.join(names)}")
    rejected: list[tuple[str, str]] = []
    for kernel in KERNELS:
        if wanted is not None and kernel.name != wanted:
            continue
        reason = kernel.can_run(layer)
        if reason is None:
            found, passed_over = kernel.instruction_set()
            return Choice(kernel.name, (*rejected, *passed_over), found)
        rejected.append((kernel.name, reason))
    raise CannotRun(
        f"no kernel runs {layer.scheme.name} [{layer.out_features}, {layer.in_features}] on "
        f"{layer.device}: " + "; ".join(f"{name}: {reason}" for name, reason in rejected)
    )
