"""The weight paths: every build of a model that this package knows how to want.

A path is a scheme for the linears, the device it is for, what runs it and what builds it. Its
stored bits per weight are arithmetic (`Scheme.bits_per_weight`): 4 + 16/G symmetric, 4 + 20/G
asymmetric with a 16-bit scale, 8 + 32/K for int8 with an fp32 scale a row (K = in_features; the
catalog counts K = 4096). The plan of a real model counts its own tensors.

A claim is a figure that somebody published, with whose it is. It is shown and never taken for
evidence: a path is verified by a record only (`evidence.py`).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from weightpath.device.profile import HardwareProfile
from weightpath.errors import BadRequest
from weightpath.paths import needs
from weightpath.scheme import INT8, PER_CHANNEL, Scheme

COMPRESSED_TENSORS = "compressed-tensors"
"""vLLM's name for the format that weightpath writes. Given explicitly, vLLM stops on a checkpoint
of another kind instead of serving it (vLLM 0.32.0, config/model.py, _verify_quantization)."""

REFERENCE_KERNEL = (
    "weightpath runs it today with its reference kernel in plain torch, which is right and not "
    "fast; native kernels come later"
)

_OTHERWISE = "; where weightpath was installed without a C++ compiler, plain torch"
_CPU_KERNEL = (
    "weightpath's compiled kernels: AMX int8, AVX-512 VNNI, AVX-VNNI, AVX2 or Arm's dot products, "
    "the fastest that this CPU has"
)

_GPU_KERNEL = (
    "weightpath's CUDA kernels, compiled at the first call, or its Triton ones; below compute "
    "capability 8.0 plain torch"
)

_SELECTOR = "the selector's authors: Xeon 8480C, 24 threads, a 1.7 B model, batch 1"
_SHEET = "the project's GPU sheet: one H200, bf16, g128, CUDA graphs, cold L2"


@dataclass(frozen=True)
class WeightPath:
    """One build of a model: which weights, for what, run by whom.

    `bits_per_weight` are stored bits of a linear. `vllm` False: an exported graph or weightpath's
    own runtime is the deliverable. `fused_cpu_norms` stays False: the selector's authors measured
    fused norms 3.6-4.5 times faster alone and slower in place; vLLM 0.32 leaves them to the
    compiler on a CPU by itself, so no argument is needed to turn them off.
    """

    name: str
    scheme: Scheme | None  # None keeps the model's dtype
    group_size: int  # -1: per output channel, or no groups at all
    engine_quantization: str | None
    bits_per_weight: float
    fused_cpu_norms: bool
    vllm: bool
    rationale: str
    built_by: str
    kernels: str
    native_kernel: bool = False
    dtype: str | None = None  # what activations are computed in; None: as the model says
    engine_environment: tuple[tuple[str, str], ...] = ()  # set before vLLM starts
    notes: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    requires: Callable[[HardwareProfile], str | None] = field(
        default=lambda profile: None, compare=False, repr=False
    )

    def fits(self, profile: HardwareProfile) -> str | None:
        """None if this device can use the path, else one sentence naming what is missing."""
        return self.requires(profile)

    def as_engine_kwargs(self) -> dict[str, object]:
        """Keyword arguments for vllm.LLM(...), empty where vLLM cannot run the path.

        `dtype` only where it decides something, `quantization` for a low-bit path. The variables
        in `engine_environment` belong to the process and cannot be passed here.
        """
        if not self.vllm:
            return {}
        kwargs: dict[str, object] = {}
        if self.engine_quantization is not None:
            kwargs["quantization"] = self.engine_quantization
        if self.dtype is not None:
            kwargs["dtype"] = self.dtype
        return kwargs

    def vllm_command(self, folder: str = "DIR", tensor_parallel: int = 1) -> str | None:
        """The shell line that serves a folder of this path with vLLM; None where vLLM cannot.

        The same arguments as `as_engine_kwargs`, and the variables before them. tensor_parallel:
        GPUs (or NUMA nodes) that the model is split over. A float path serves MODEL as it is.
        """
        if not self.vllm:
            return None
        words = [f"{name}={value}" for name, value in self.engine_environment]
        words += ["vllm", "serve", shlex.quote(folder)]
        for name, value in self.as_engine_kwargs().items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        if tensor_parallel > 1:
            words += ["--tensor-parallel-size", str(tensor_parallel)]
        return " ".join(words)

    def with_scheme(self, scheme: Scheme) -> WeightPath:
        """The same path with another group size: its bits and its build command follow."""
        return replace(
            self,
            scheme=scheme,
            group_size=scheme.group_size,
            bits_per_weight=stored_bits(scheme),
            built_by=_build_command(scheme) if self.engine_quantization else self.built_by,
        )


def stored_bits(scheme: Scheme, in_features: int = 4096) -> float:
    """Stored bits per weight of one linear: 16-bit scales, but fp32 ones for int8 per channel."""
    per_channel_int8 = scheme.bits == 8 and scheme.group_size == PER_CHANNEL
    columns = in_features if scheme.group_size == PER_CHANNEL else scheme.group_size
    return scheme.bits_per_weight(columns, scale_bits=32 if per_channel_int8 else 16)


def find_path(name: str) -> WeightPath:
    """The path of that name. Raises BadRequest with the names there are."""
    for path in CATALOG:
        if path.name == name:
            return path
    known = ", ".join(path.name for path in CATALOG)
    raise BadRequest(f"weight path '{name}': unknown; use one of {known}")


def _build_command(scheme: Scheme) -> str:
    stored = "int8" if scheme == INT8 else scheme.with_activations(16).name
    return f"weightpath quantize MODEL -o DIR --scheme {stored}"


def _low_bit(
    name: str,
    scheme: Scheme,
    rationale: str,
    requires: Callable[[HardwareProfile], str | None],
    vllm: bool,
    compiled: str | None = None,
    dtype: str | None = None,
    engine_environment: tuple[tuple[str, str], ...] = (),
    notes: tuple[str, ...] = (),
    claims: tuple[str, ...] = (),
) -> WeightPath:
    """A path of quantized linears. compiled: the kernels of this package that run it, if any."""
    return WeightPath(
        name=name,
        scheme=scheme,
        group_size=scheme.group_size,
        engine_quantization=COMPRESSED_TENSORS,
        bits_per_weight=stored_bits(scheme),
        fused_cpu_norms=False,
        vllm=vllm,
        rationale=rationale,
        built_by=_build_command(scheme),
        kernels=REFERENCE_KERNEL
        if compiled is None
        else compiled + ("" if compiled == _GPU_KERNEL else _OTHERWISE),
        native_kernel=compiled is not None,
        dtype=dtype,
        engine_environment=engine_environment,
        notes=notes,
        claims=claims,
        requires=requires,
    )


def _float(
    name: str,
    dtype: str,
    bits: float,
    rationale: str,
    requires: Callable[[HardwareProfile], str | None],
    claims: tuple[str, ...] = (),
) -> WeightPath:
    return WeightPath(
        name=name,
        scheme=None,
        group_size=PER_CHANNEL,
        engine_quantization=None,
        bits_per_weight=bits,
        fused_cpu_norms=False,
        vllm=True,
        rationale=rationale,
        built_by="nothing to build: the checkpoint runs as it is",
        kernels="torch's own matrix product",
        native_kernel=True,
        dtype=dtype,
        claims=claims,
        requires=requires,
    )


_W4A8 = Scheme(4, 128, symmetric=False, activation_bits=8)
_W4A16 = Scheme(4, 128, symmetric=False)
_ASYMMETRIC = (
    "zero points are in it for what they gain: at groups of 64, KLD 0.036 instead of 0.043 on a "
    "42M model of Python source, for 1.5% of bytes and 2 to 3% of a prompt's time "
    "(benchmarks/activation_cost.py and docs/experiments.md)"
)
_W4A8_ON = (("VLLM_CPU_INT4_W4A8", "1"),)  # vLLM 0.32.0, envs.py: the default, made explicit
_W4A8_OFF = (("VLLM_CPU_INT4_W4A8", "0"),)  # else vLLM quantizes activations on AMX

CATALOG: tuple[WeightPath, ...] = (
    _low_bit(
        "w4a8-amx",
        _W4A8,
        "AMX tiles multiply int8 by int8 at 1024 products a cycle and core, so 4-bit weights "
        "with int8 activations are fastest at both prompt and decode; the least faithful path",
        needs.amx,
        vllm=True,
        compiled="weightpath's compiled kernel on AMX int8 tiles, on AVX-512 VNNI below 8 rows",
        dtype="bfloat16",  # vLLM quantizes activations for bf16 models only
        engine_environment=_W4A8_ON,
        notes=(_ASYMMETRIC,),
        claims=(
            f"86.6 tok/s, GEMM 5.91 ms of an 11.55 ms step ({_SELECTOR})",
            "prefill 3.0 times llama.cpp's (the selector's authors)",
            "1 of 12 greedy prompts equal to its own bf16 (the selector's authors)",
        ),
    ),
    _low_bit(
        "w4a8-vnni",
        _W4A8,
        "vpdpbusd multiplies unsigned 4-bit codes by int8 activations, 64 products a cycle and "
        "core, so decode is bound by reading 4-bit weights and a prompt by int8 arithmetic",
        needs.vnni,
        vllm=False,
        compiled="weightpath's compiled kernel on AVX-512 VNNI or AVX-VNNI",
        notes=(
            _ASYMMETRIC,
            "vLLM opens the file and runs it with 16-bit activations: there it is w4a16-tinygemm",
        ),
        claims=(
            "llama.cpp Q4_0, also 4-bit by int8: 137 tok/s decode against 24 for transformers in "
            "bf16, SmolLM2-135M on a 2-core Zen 4 (the project's CPU sheet)",
        ),
    ),
    _low_bit(
        "w4a8-avx2",
        _W4A8,
        "maddubs multiplies unsigned 4-bit codes by int8 activations with AVX2 alone; decode is "
        "bound by reading the weights there too",
        needs.avx2,
        vllm=False,
        compiled="weightpath's compiled kernel on AVX2",
        notes=(_ASYMMETRIC, "plain AVX-512 without VNNI runs this path as well"),
    ),
    _low_bit(
        "w4a16-tinygemm",
        _W4A16,
        "4-bit codes with 16-bit activations and a zero point a group: slower arithmetic than "
        "int8 activations, and closer to the model",
        needs.cpu,
        vllm=True,
        compiled=_CPU_KERNEL + ", with 16-bit activations as two int8 planes",
        engine_environment=_W4A8_OFF,
        notes=(
            "named after the torch kernel that first ran these weights on a CPU; weightpath runs "
            "them without it",
            "tinygemm holds a bf16 scale and a bf16 zero a group in memory: 4 + 32/G bits",
            "vLLM runs it with a vector kernel of its own, on x86 with AVX-512 only",
        ),
        claims=(
            f"80.0 tok/s, GEMM 6.85 ms of a 12.51 ms step ({_SELECTOR})",
            "2 of 12 greedy prompts equal to its own bf16 (the selector's authors)",
        ),
    ),
    _low_bit(
        "w8a16",
        INT8,
        "int8 per output channel on any device: the most faithful low-bit path, at twice the bytes "
        "of a 4-bit one",
        needs.torch_device,
        vllm=False,
        compiled=_CPU_KERNEL + "; on another CPU one without vectors, below 8 rows of activations",
    ),
    _low_bit(
        "w4a16-cuda",
        _W4A16,
        "decode at batch 1 is bound by memory bandwidth: about 4.2 of bf16's 16 bits a weight are "
        "read; the source left 4-bit on GPUs to a separate question, and this is the answer",
        needs.turing,
        vllm=True,
        compiled=_GPU_KERNEL,
        notes=("vLLM runs it with Marlin, or Machete on compute capability 9.0",),
        claims=(
            f"(28672, 4096) at one row: bf16 59.1 µs, tinygemm 34.4, Humming 23.4 ({_SHEET})",
            f"the same at 2048 rows: bf16 615 µs, Humming 691, so slower than bf16 ({_SHEET})",
        ),
    ),
    _low_bit(
        "w8a16-cuda",
        INT8,
        "int8 per output channel halves the bytes of bf16 at decode and loses far less than 4 "
        "bits; the source left low-bit on GPUs open, and this is the answer where fidelity leads",
        needs.turing,
        vllm=True,
        compiled=_GPU_KERNEL,
        notes=("vLLM runs it with Marlin and rounds the fp32 scales to the model's dtype",),
    ),
    _float(
        "bf16",
        "bfloat16",
        16.0,
        "the model's own dtype: nothing is lost and nothing is saved",
        needs.bf16,
        claims=(f"41.0 tok/s ({_SELECTOR})",),
    ),
    _float(
        "fp16",
        "float16",
        16.0,
        "stands in for bf16 where bf16 arithmetic is missing; activations above 65504 overflow",
        needs.fp16,
    ),
    _float(
        "fp32",
        "float32",
        32.0,
        "runs wherever torch does, at twice the bytes of a 16-bit model",
        needs.torch_device,
    ),
    WeightPath(
        name="export-qnn-w8a16",
        scheme=INT8,
        group_size=PER_CHANNEL,
        engine_quantization=None,
        bits_per_weight=stored_bits(INT8),
        fused_cpu_norms=False,
        vllm=False,
        rationale="an NPU runs a compiled integer graph: int8 weights, 16-bit integer activations",
        built_by="weightpath export MODEL, which this version does not have yet",
        kernels="the phone vendor's compiler makes the kernels from the exported graph",
        notes=("the graph must be calibrated on real activations",),
        claims=(
            "36.9 dB per layer against the float reference; w8a8 5.1 dB, uncalibrated w4a16 "
            "-1.6 dB (the selector's authors)",
            "8-bit 0.912 ms and 4-bit 0.917 ms a layer: 4 bits save memory there, not time "
            "(the selector's authors)",
        ),
        requires=needs.phone,
    ),
)
