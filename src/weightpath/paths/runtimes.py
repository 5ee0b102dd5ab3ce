"""What each runtime loads, as data read in its own source, and one function that answers.

A runtime bounds the choice of a path: `loads` says yes (None) or one sentence that names what is
missing and the version it was read from. A file that a runtime opens but runs with other
activations than the scheme asks for counts as not loaded: the choice must mean what it says. One
exception: llama.cpp picks the bits of activations by backend and offers no choice, so either is
taken there, and `computes` says it.

`quantize` writes compressed-tensors. llama.cpp opens GGUF, which `weightpath convert` makes of it,
so its row is what GGUF's blocks hold of the codes that `quantize` writes.

Read: vLLM 0.32.0 (CPU wheels for x86-64 and aarch64: Python source, and the operators that each
compiled extension holds), transformers 5.24 with compressed-tensors 0.20, gguf-py 0.19 (blocks).
"""

from __future__ import annotations

from dataclasses import dataclass

from weightpath.device.profile import HardwareProfile, hardware_class, has_amx
from weightpath.errors import BadRequest
from weightpath.scheme import INT8, PER_CHANNEL, Scheme


@dataclass(frozen=True)
class Runtime:
    """A program that runs a checkpoint: what it opens and how it computes."""

    name: str
    read_from: str  # the version that the facts below were read from
    file_format: str
    computes: str  # how low-bit weights are used, one sentence
    hosts: tuple[str, ...] = ()  # operating systems it runs on; empty: any


@dataclass(frozen=True)
class Accepts:
    """What one runtime loads on one hardware class. Group size -1 is per output channel."""

    bits: tuple[int, ...]
    asymmetric_bits: tuple[int, ...] = ()
    group_sizes: tuple[int, ...] | None = None  # None: any
    group_multiple: int = 1
    in_multiple: int = 1  # of in_features
    out_multiple: int = 1  # of out_features
    grouped_bits: tuple[int, ...] | None = None  # bits that may come in groups; None: all of them
    float_flag: str = ""  # a flag that the runtime needs for anything at all
    cpu_flag: str = ""  # a flag that its low-bit kernel was compiled for
    capability: tuple[int, int] = (0, 0)  # lowest CUDA compute capability
    int8_activations: str = "never"  # "never", "amx" (AMX tiles only) or "always"
    kernel: str = ""  # whose limits these are
    because: str = ""  # why nothing is taken, where `bits` is empty
    no_int8_head: str = ""  # why an int8 head is not taken where int8 linears are


RUNTIMES = (
    Runtime(
        "weightpath",
        "this version",
        "compressed-tensors pack-quantized",
        "weightpath keeps the codes packed and computes with its own kernels",
    ),
    Runtime(
        "vllm",
        "vLLM 0.32.0",
        "compressed-tensors pack-quantized",
        "vLLM repacks the codes for its kernels and holds every scale in the model's dtype, so "
        "the fp32 scales of int8 are rounded to it",
        hosts=("linux", "wsl2", "darwin"),
    ),
    Runtime(
        "transformers",
        "transformers 5.24 with compressed-tensors 0.20",
        "compressed-tensors pack-quantized",
        "transformers decompresses every weight to the model's dtype at the first forward pass: "
        "the file is small, memory and speed are those of the float model",
    ),
    Runtime(
        "llama.cpp",
        "gguf-py 0.19",
        "GGUF",
        "llama.cpp opens GGUF: run `weightpath convert DIR --to gguf -o FILE.gguf` on what "
        "quantize writes; it keeps the codes, rounds scales (and minimums, where asymmetric) to "
        "fp16, and llama.cpp multiplies them by 8-bit or 16-bit activations as its backend does",
    ),
)

_TORCH = Accepts(  # plain torch, so the same on every device that torch runs on
    bits=(4, 8),
    asymmetric_bits=(4,),
    grouped_bits=(4,),
    int8_activations="always",
    kernel="weightpath's Int4Linear and Int8Linear",
)
_MARLIN = Accepts(  # kernels/linear/mixed_precision/marlin.py, marlin_utils.py
    bits=(4, 8),
    asymmetric_bits=(4,),
    group_sizes=(PER_CHANNEL, 32, 64, 128),
    capability=(7, 5),
    kernel="vLLM 0.32.0's Marlin kernel",
)
_DECOMPRESS = Accepts(
    bits=tuple(range(2, 9)),
    asymmetric_bits=tuple(range(2, 9)),
    kernel="transformers 5.24 (it decompresses to the model's dtype)",
    # Seen with compressed-tensors 0.20.1: with dequantize=True the head is unpacked by the
    # linears' scheme, and beside asymmetric linears no way of loading it works.
    no_int8_head="it garbles an int8 head beside 4-bit linears where it dequantizes at load",
)

_BLOCKS = Accepts(  # checkpoints/gguf_blocks.py: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, a scale a 32
    bits=tuple(range(2, 9)),
    asymmetric_bits=(2, 3, 4, 5),
    group_multiple=32,
    in_multiple=32,
    int8_activations="always",
    kernel="llama.cpp in GGUF's blocks of 32",
)

ACCEPTS: dict[tuple[str, str], Accepts] = {
    ("weightpath", "x86_cpu"): _TORCH,
    ("weightpath", "arm64_cpu"): _TORCH,
    ("weightpath", "cuda_discrete"): _TORCH,
    ("weightpath", "jetson"): _TORCH,
    ("weightpath", "npu_phone"): Accepts(
        bits=(8,), grouped_bits=(), kernel="the exported graph for a phone's NPU"
    ),
    # kernels/linear/mixed_precision/cpu.py; cpu_gemm_wna16 is in the AVX-512 extensions only,
    # int4_scaled_mm_cpu (int8 activations) is used where torch reports AMX tiles.
    ("vllm", "x86_cpu"): Accepts(
        bits=(4,),
        asymmetric_bits=(4,),
        group_multiple=2,
        in_multiple=32,
        out_multiple=32,
        float_flag="avx2",
        cpu_flag="avx512f",
        int8_activations="amx",
        kernel="vLLM 0.32.0's CPU kernel",
    ),
    ("vllm", "arm64_cpu"): Accepts(
        bits=(),
        kernel="vLLM 0.32.0 on Arm",
        because="its aarch64 build holds no kernel for packed weight-only integers",
    ),
    ("vllm", "cuda_discrete"): _MARLIN,
    ("vllm", "jetson"): _MARLIN,
    ("transformers", "x86_cpu"): _DECOMPRESS,
    ("transformers", "arm64_cpu"): _DECOMPRESS,
    ("transformers", "cuda_discrete"): _DECOMPRESS,
    ("transformers", "jetson"): _DECOMPRESS,
    ("llama.cpp", "x86_cpu"): _BLOCKS,
    ("llama.cpp", "arm64_cpu"): _BLOCKS,
    ("llama.cpp", "cuda_discrete"): _BLOCKS,
    ("llama.cpp", "jetson"): _BLOCKS,
}

_OTHER_CPU = {"weightpath": _TORCH, "transformers": _DECOMPRESS, "llama.cpp": _BLOCKS}


def find_runtime(name: str) -> Runtime:
    """The runtime of that name. Raises BadRequest with the names there are."""
    for runtime in RUNTIMES:
        if runtime.name == name:
            return runtime
    known = ", ".join(runtime.name for runtime in RUNTIMES)
    raise BadRequest(f"runtime '{name}': unknown; use one of {known}")


def loads(
    runtime: str,
    scheme: Scheme | None,
    role: str,
    profile: HardwareProfile,
    in_features: int | None = None,
    out_features: int | None = None,
) -> str | None:
    """None if `runtime` loads such a weight on this device, else the sentence why not.

    scheme: None stands for the model's own dtype. role: "linear" or "head" (the output
    projection). in_features, out_features: K and N, where they are known. For llama.cpp: whether
    the GGUF that `weightpath convert` makes holds it. Raises BadRequest for an unknown runtime.
    """
    facts = find_runtime(runtime)
    if facts.hosts and profile.host_os not in facts.hosts:
        return f"{facts.read_from} does not run on {profile.host_os}"
    device = hardware_class(profile)
    accepts = ACCEPTS.get((runtime, device), _OTHER_CPU.get(runtime))
    if device == "npu_phone" and runtime != "weightpath":
        return f"{facts.name} does not run on a phone's NPU: an exported graph does"
    if accepts is None:
        return f"what {facts.read_from} loads on {device} ({profile.arch}) was never read"
    if accepts.float_flag and accepts.float_flag not in profile.cpu_flags:
        return f"{facts.read_from} needs {accepts.float_flag}, which this CPU lacks"
    if scheme is None:
        if device == "npu_phone":
            return "a phone's NPU runs an exported integer graph, not the model's own dtype"
        return None
    stored = "int8" if scheme == INT8 else scheme.name
    what = (
        f"{'an' if stored == 'int8' else 'a'} {stored} head"
        if role != "linear"
        else (f"{stored} linears")
    )
    if role != "linear" and stored == "int8" and accepts.no_int8_head:
        return f"{accepts.kernel}: {accepts.no_int8_head}"
    if accepts.cpu_flag and accepts.cpu_flag not in profile.cpu_flags:
        return f"{accepts.kernel} for packed weights needs {accepts.cpu_flag}, which this CPU lacks"
    if (profile.gpu_capability or (0, 0)) < accepts.capability:
        return (
            f"{accepts.kernel} needs compute capability {_dotted(accepts.capability)}, this GPU "
            f"has {_dotted(profile.gpu_capability) if profile.gpu_capability else 'an unknown one'}"
        )
    if reason := refuses(accepts, scheme, what, in_features, out_features):
        return reason
    if scheme.activation_bits == 8 and not (
        accepts.int8_activations == "always"
        or (accepts.int8_activations == "amx" and has_amx(profile))
    ):
        where = " without AMX tiles" if accepts.int8_activations == "amx" else ""
        runs = f"{accepts.kernel} runs 4-bit weights with 16-bit activations{where}"
        return f"{runs}, not with int8 ones"
    return None


def refuses(
    accepts: Accepts,
    scheme: Scheme,
    what: str,
    in_features: int | None = None,
    out_features: int | None = None,
) -> str | None:
    """The first limit on weights that a scheme and shape break, as a sentence, or None.

    what: how the sentence names the weight ("a w4g48 head"). Limits of the device are not asked.
    """
    kernel, group = accepts.kernel, scheme.group_size
    if not accepts.bits:
        return f"{kernel} cannot load {what}: {accepts.because}"
    if scheme.bits not in accepts.bits:
        taken = " and ".join(f"{bits}-bit" for bits in accepts.bits)
        return f"{kernel} takes {taken} weights only, not {what}"
    if not scheme.symmetric and scheme.bits not in accepts.asymmetric_bits:
        return f"{kernel} takes {scheme.bits}-bit weights without zero points only, not {what}"
    if group != PER_CHANNEL:
        grouped = accepts.bits if accepts.grouped_bits is None else accepts.grouped_bits
        if scheme.bits not in grouped:
            return f"{kernel} takes {scheme.bits}-bit weights per output channel only, not {what}"
        if group % accepts.group_multiple:
            return f"{kernel} takes groups that are a multiple of {accepts.group_multiple}"
    if accepts.group_sizes is not None and group not in accepts.group_sizes:
        sizes = ", ".join(str(size) for size in accepts.group_sizes if size != PER_CHANNEL)
        return f"{kernel} takes groups of {sizes} or whole rows, not {group}"
    for side, size, multiple in (
        ("in_features", in_features, accepts.in_multiple),
        ("out_features", out_features, accepts.out_multiple),
    ):
        if size is not None and size % multiple:
            return f"{kernel} takes {side} that are a multiple of {multiple}, not {size}"
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
