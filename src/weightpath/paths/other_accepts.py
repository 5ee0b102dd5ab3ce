"""Which checkpoints transformers 5, llama.cpp and weightpath itself load.

Read: transformers 5.24 (quantizers/, utils/quantization_config.py and
integrations/compressed_tensors.py) with compressed-tensors 0.20, GPTQModel 7.3
(nn_modules/qlinear), llama.cpp's converter of 2026 (conversion/base.py, dequant_model).
What is marked inferred was not run.
"""

from __future__ import annotations

from collections.abc import Mapping

from weightpath.paths.held import Answer, Held, asymmetric, named, ordered, schemes_of
from weightpath.paths.runtimes import ACCEPTS
from weightpath.scheme import INT8

_WITH_GPTQ = ("optimum>=1.24", "gptqmodel>=1.4.3")
_DECOMPRESS = ACCEPTS["transformers", "x86_cpu"]
_CONVERTER_BITS = (2, 4, 8)
"""GPTQ widths that llama.cpp's converter reads."""


def transformers_answer(held: Held) -> Answer:
    """What transformers 5 does with a checkpoint, by from_pretrained."""
    if held.no_model:
        return Answer("no", f"{held.no_model}, unless code of the checkpoint's own brings it")
    if held.format == "float":
        return Answer("yes", "it runs float checkpoints")
    if held.format.startswith("GGUF"):
        return Answer(
            "yes",
            "by gguf_file=FILE; it unpacks the blocks unless the `kernels` package has a kernel",
            ("gguf>=0.10",),
        )
    if held.config_missing:
        return Answer(
            "wrong",
            "without a quantization_config in config.json it takes the model for a float one, "
            "fills the weights that it does not find at random and only warns (inferred)",
        )
    for reader in (_awq, _gptq, _compressed, _by_package):
        answer = reader(held)
        if answer is not None:
            return answer
    return Answer("no", f"it has no reader for {held.format}")


def llama_cpp_answer(held: Held) -> Answer:
    """What llama.cpp does: it opens GGUF, and its converter dequantizes some other formats."""
    if held.format.startswith("GGUF"):
        return Answer("yes", "it runs the blocks as they are")
    return Answer("no", f"it opens GGUF files alone; {_converter(held)}")


def weightpath_answer(held: Held) -> Answer:
    """What weightpath does with a checkpoint that it has opened: it runs all low-bit ones whose
    model transformers knows."""
    if held.no_model:
        return Answer("no", f"{held.no_model}; it inspects and converts the file all the same")
    if held.no_place:
        first, *others = held.no_place
        more = f" and {len(others)} more" if others else ""
        return Answer(
            "no",
            f"the model that transformers makes of config.json has no place for {first}{more}; it "
            "inspects and converts the file all the same",
        )
    if held.format == "float" or (held.format.startswith("GGUF") and not held.linears):
        return Answer(
            "no",
            "it runs low-bit weights, and these are floats, of which weightpath quantize makes them",
        )
    clauses = []
    if floats := named(held.linears, lambda linear: linear.scheme is None):
        clauses.append(f"{floats} as floats")
    if disordered := ordered(held):
        clauses.append(f"{disordered} by gathering activations")
    if held.contradictions:
        clauses.append(f"going by the data, since {held.contradictions[0]}")
    if held.config_missing and not held.format.startswith("GGUF"):
        clauses.append("by the shapes of its tensors, since the config is missing")
    return Answer("yes", "it runs it" + (f": {'; '.join(clauses)}" if clauses else ""))


def _awq(held: Held) -> Answer | None:
    if not held.format.startswith("AWQ"):
        return None
    why = "by GPTQModel, which has kernels for gemm, gemv, gemv_fast and llm-awq"
    if held.dtype == "bfloat16":
        why += "; on an accelerator it casts a bf16 model to fp16"
    return Answer("yes", why, ("gptqmodel", "accelerate"))


def _gptq(held: Held) -> Answer | None:
    if not held.format.startswith("GPTQ"):
        return None
    settings = held.settings
    for scheme in schemes_of(held):
        if scheme.bits not in (2, 3, 4, 8):
            return Answer("no", f"its GPTQConfig takes 2, 3, 4 and 8 bits, not {scheme.bits}")
    label = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    stated, stored = "v2" if str(label) in ("gptq_v2", "gptq_p") else "v1", held.format[-2:]
    if stated != stored:
        return Answer(
            "wrong",
            f"GPTQModel goes by the label ({label}) and the zeros are stored as {stored}: every "
            "zero point is off by one where a kernel uses them",
        )
    disordered = ordered(held)
    if disordered and not settings.get("desc_act"):
        return Answer(
            "wrong",
            "under desc_act false GPTQModel's Marlin kernel drops g_idx, though "
            f"{disordered} has an order of its own (its torch kernel keeps it)",
        )
    return Answer(
        "yes", "by optimum and GPTQModel, for models whose input is text alone", _WITH_GPTQ
    )


def _compressed(held: Held) -> Answer | None:
    if not held.format.startswith("compressed-tensors"):
        return None
    if disordered := ordered(held):
        return Answer("wrong", "it has no place for weight_g_idx and decompresses "
                      f"{disordered} in the plain order (inferred)")  # fmt: skip
    if held.padded_words:
        return Answer(
            "no",
            "compressed-tensors since 0.18 wants codes packed densely, and these are in words "
            "padded to whole codes: the shapes differ",
        )
    schemes, uneven = schemes_of(held), asymmetric(held)
    dense = ">=0.18" if any(scheme.bits not in (2, 4, 8) for scheme in schemes) else ">=0.15"
    needs = (f"compressed-tensors{dense}",)
    if held.format.endswith("int-quantized"):
        return Answer("yes", "it decompresses every weight at the first forward pass", needs)
    if uneven and len(schemes) > 1:
        head = " and an int8 head is garbled so" if _int8_head(held) else ""
        return Answer(
            "no",
            f"zero points ({uneven}) need dequantize=True, which unpacks every linear by the first "
            f"of {len(schemes)} schemes{head}",
        )
    if uneven:
        return Answer("yes", "with zero points it decompresses at load alone",
                      (*needs, "CompressedTensorsConfig(dequantize=True)"))  # fmt: skip
    why = "it decompresses every weight at the first forward pass"
    if len(schemes) > 1:
        why += (
            f" ({_DECOMPRESS.no_int8_head})"
            if _int8_head(held)
            else "; dequantize=True would unpack every linear by the first scheme"
        )
    return Answer("yes", why, needs)


def _by_package(held: Held) -> Answer | None:
    """Formats that transformers hands to the package that wrote them."""
    if held.format.startswith("AutoRound"):
        return Answer("yes", "by the auto-round package", ("auto-round>=0.5",))
    if held.format == "torchao":
        return Answer("yes", "by torchao, which must still know the version of the config "
                      "(vllm#52947)", ("torchao",))  # fmt: skip
    if held.format == "bitsandbytes":
        return Answer("yes", "by bitsandbytes", ("bitsandbytes", "accelerate"))
    if held.format == "HQQ":
        return Answer("yes", "by hqq, on an accelerator alone", ("hqq>=0.2.1",))
    if held.format == "ModelOpt":
        return Answer("no", "it does not know quant_method modelopt, skips it with a warning, and "
                      "stops at weights of another shape (inferred)")  # fmt: skip
    return None


def _int8_head(held: Held) -> bool:
    return any(linear.role == "head" and linear.scheme == INT8 for linear in held.linears)


def _converter(held: Held) -> str:
    """What llama.cpp's own converter makes of a format, as a clause."""
    whole = "its converter turns {} into floats, to be quantized again"
    if held.format == "float":
        return "its converter, or weightpath's, makes one of floats"
    if held.config_missing or held.nested:
        return "its converter looks for quantization_config at the top of config.json alone"
    if held.format.startswith("GPTQ"):
        bits = {scheme.bits for scheme in schemes_of(held)}
        if bits - set(_CONVERTER_BITS):
            return "its converter reads GPTQ of 2, 4 and 8 bits alone"
        label = held.settings.get("checkpoint_format", "gptq")
        if ("v1" if label == "gptq" else "v2") != held.format[-2:]:
            return (
                "its converter goes by checkpoint_format alone and would take every zero point off "
                "by one"
            )
        return whole.format("GPTQ")
    if held.format == "compressed-tensors pack-quantized":
        groups = held.settings.get("config_groups")
        if isinstance(groups, Mapping) and len(groups) > 1:
            return "its converter takes one config group alone"
        if any(scheme.group_size < 0 for scheme in schemes_of(held)):
            return "its converter takes pack-quantized in groups alone, not whole rows"
        odd = any(scheme.bits not in (2, 4, 8) for scheme in schemes_of(held))
        if odd and not held.padded_words:
            return "its converter takes words padded to whole codes, and these are dense"
        return whole.format("compressed-tensors")
    if held.format == "compressed-tensors int-quantized":
        return whole.format("compressed-tensors")
    return f"its converter does not read {held.format}"
