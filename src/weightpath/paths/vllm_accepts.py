"""Which checkpoints vLLM loads, computes wrongly or refuses, by release and device.

Read: see vllm_gptq.py and vllm_compressed.py; here also 0.32.0's torchao.py, modelopt.py,
weight_utils.py and list of methods (one Python source for CPU and CUDA), and for what left: GGUF
(in core in 0.23.0, a plugin by 0.24.0, vllm#39612), bitsandbytes (there in 0.27.1, gone in 0.28.0,
vllm#39583). A change between two releases that were read is put at the later one. What lies between
two, or behind a call into a kernel that a build lacks, is inferred.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightpath.paths.held import Answer, Held, named, scale_rounding, schemes_of
from weightpath.paths.vllm_compressed import compressed_tensors
from weightpath.paths.vllm_gptq import autoround, awq, gptq

FIRST_OF_SPAN = (0, 22, 24, 27, 28, 30, 32)
"""First minor release of every span that behaves alike: 0.22 has one GPTQ reader, 0.24 no GGUF,
0.27 all widths, 0.28 no bitsandbytes, 0.30 no column orders, 0.32 zero points of all widths."""
OLDEST, NEWEST = 19, 33
"""Minor releases between which it was read."""
DEVICES = ("CUDA", "CPU")
_IN_MODEL_DTYPE = ("AWQ", "GPTQ", "AutoRound", "compressed-tensors")
"""Formats whose scales it copies into the model's dtype; int-quantized ones stay fp32."""


def vllm_answer(held: Held, release: int, device: str) -> Answer:
    """What vLLM 0.`release` does on "CUDA" or "CPU" with a checkpoint."""
    if held.format == "float":
        return Answer("yes", "it runs float checkpoints")
    if held.config_missing and not held.format.startswith("GGUF"):
        return Answer(
            "no",
            "without a quantization_config in config.json it takes the model for a float one and "
            "stops at packed tensors that have no place in it (it looks into quantize_config.json "
            "or quant_config.json only where --quantization names the method)",
        )
    for reader in (_gguf, awq, gptq, autoround, compressed_tensors, _torchao, _gone):
        answer = reader(held, release, device)
        if answer is not None:
            return answer if answer.loads != "yes" else _with_clauses(held, answer)
    return Answer("no", f"it has no reader for {held.format}")


def span_label(first: int, following: int | None) -> str:
    """Releases from minor `first` until before `following` (None: no end) as a phrase."""
    if following is None:
        return f">= 0.{first}" if first else f"0.{OLDEST} to 0.{NEWEST}"
    if not first:
        return f"<= 0.{following - 1}"
    return f"0.{first}" if first == following - 1 else f"0.{first} to 0.{following - 1}"


def _with_clauses(held: Held, answer: Answer) -> Answer:
    """A yes with what else a user should know: scales that are rounded, where the config is."""
    clauses = [answer.why]
    if held.format.startswith(_IN_MODEL_DTYPE) and not held.format.endswith("int-quantized"):
        clauses.extend(filter(None, [scale_rounding(held)]))
    if held.nested:
        clauses.append("it finds the quantization config in text_config too")
    return Answer(answer.loads, "; ".join(clauses), answer.needs)


def _gguf(held: Held, release: int, device: str) -> Answer | None:
    if not held.format.startswith("GGUF"):
        return None
    if device == "CPU":
        return Answer("no", "its GGUF kernels are CUDA's, and a CPU build has none (vllm#8500)")
    if release < 24:
        return Answer("yes", "its own GGUF reader")
    return Answer(
        "yes",
        "by a plugin since GGUF left its core (vllm#39612); the plugin was not read",
        ("vllm-gguf-plugin>=0.0.2",),
    )


def _torchao(held: Held, release: int, device: str) -> Answer | None:
    if held.format != "torchao":
        return None
    if heads := named(held.linears, lambda linear: linear.role == "head"):
        return Answer("no", f"its torchao reader takes linears alone, and {heads} is low-bit too")
    if device == "CPU" and any(scheme.bits == 4 for scheme in schemes_of(held)):
        return Answer("no", "torchao's int4 tensors multiply on accelerators alone (inferred)")
    return Answer(
        "yes",
        "it hands the tensors to torchao, which must still know the version of their config "
        "(torchao 0.18 drops old ones, vllm#52947)",
        ("torchao>=0.15",),
    )


def _gone(held: Held, release: int, device: str) -> Answer | None:
    """Formats that no release reads, or that one stopped reading."""
    if held.format == "bitsandbytes":
        if device == "CPU":
            return Answer("no", "its bitsandbytes reader was CUDA's (inferred)")
        if release < 28:
            return Answer("yes", "its bitsandbytes reader, without tensor parallelism",
                          ("bitsandbytes",))  # fmt: skip
        return Answer(
            "no", "bitsandbytes left it with 0.28 (vllm#39583); a plugin for it was not read"
        )
    if held.format == "HQQ":
        return Answer(
            "no",
            "it has no HQQ reader (0.32 and 0.33; when the older one left, which took 4-bit groups "
            "of 64 alone, was not read)",
        )
    if held.format == "ModelOpt":
        return Answer("no", "its ModelOpt readers take FP8, NVFP4 and MXFP8, not "
                      f"{_algorithm(held.settings)}")  # fmt: skip
    return None


def _algorithm(settings: Mapping[str, Any]) -> str:
    inner = settings.get("quantization")
    found = (inner if isinstance(inner, Mapping) else settings).get("quant_algo")
    return str(found) if found else "integers"
