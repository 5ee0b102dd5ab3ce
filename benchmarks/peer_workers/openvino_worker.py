"""OpenVINO GenAI on the CPU; run by the python of .venv-openvino.

    {"do": "prepare", "gguf", "folder"} -> {"weight_bytes"}      GGUF to a graph in groups of 64
    {"do": "load", "folder", "threads"} -> {"load_seconds", "first_seconds"}
    {"do": "speed", "prompt": [ids], "steps"} -> {"prefill_seconds", "decode_seconds", "tokens"}
    {"do": "compile", "folder", "threads", "settings"} -> {"settings"}    the bare graph, for logits
    {"do": "logits", "ids": [ids], "first", "file"} -> {"rows"}
    {"do": "versions"} -> {"openvino"}

prepare: GenAI reads the GGUF file and saves its graph, whose weights are unsigned codes in blocks
of 32 with a zero point each. Neighbouring blocks of equal scales are one group of the model that
the file was made from, so they are joined, and the codes become signed (code ^ 8 in four bits is
code - 8), which is how OpenVINO's own converter stores a symmetric 4-bit weight:

    u4 [N, K/32, 32] - zero, * scale [N, K/32, 1]   ->   i4 [N, K/64, 64] * scale [N, K/64, 1]

No weight changes. weight_bytes counts the joined codes and scales.

compile: settings are OpenVINO's properties beyond its defaults; the answer says what of ARITHMETIC
is in force. logits: for every i from `first` on, the logits after ids[: i + 1], written to `file` as
fp32 [rows, vocabulary]; the first is read as a prompt, each later one is a step of one token.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov  # pyright: ignore[reportMissingImports]
import openvino_genai as genai  # pyright: ignore[reportMissingImports]
from loop import answer
from openvino import opset13 as ops  # pyright: ignore[reportMissingImports]

FIRST = 8
MOST_TOKENS = 8192  # a prompt is read in one step
CACHE_GB = 1
ARITHMETIC = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE")
SIGNED = {"u4": (ov.Type.i4, 0x88), "u8": (ov.Type.i8, 0x80)}
"""Unsigned codes' signed twin, and what turns a byte of one into the other."""


def joined(model: Any) -> int:
    """Rewrite every low-bit weight of a graph as above; bytes of codes and scales."""
    total = 0
    for multiply in list(model.get_ops()):
        parts = low_bit(multiply)
        if parts is None:
            continue
        codes, scales = parts
        kind, flip = SIGNED[codes.get_element_type().get_type_name()]
        n, groups, size = codes.get_output_shape(0)
        values = scales.data.reshape(n, groups)
        run = equal_run(values)
        shape = [n, groups // run, size * run]
        packed = (codes.data.view(np.uint8) ^ np.uint8(flip)).reshape(-1)
        signed = ov.op.Constant(ov.Tensor(packed, ov.Shape(shape), kind), shared_memory=False)
        scale = ops.constant(np.ascontiguousarray(values[:, ::run, None]))
        product = ops.multiply(ops.convert(signed, "f16"), scale)
        for reader in multiply.output(0).get_target_inputs():
            reader.replace_source_output(product.output(0))
        total += packed.nbytes + values[:, ::run].nbytes
    return total


def low_bit(multiply: Any) -> tuple[Any, Any] | None:
    """Codes and scales of (codes - middle) * scales; None for any other node."""
    if multiply.get_type_name() != "Multiply":
        return None
    subtract, scales = (multiply.input_value(side).get_node() for side in (0, 1))
    if subtract.get_type_name() != "Subtract" or scales.get_type_name() != "Constant":
        return None
    codes, zeros = (subtract.input_value(side).get_node() for side in (0, 1))
    if codes.get_type_name() == zeros.get_type_name() == "Convert":
        codes, zeros = codes.input_value(0).get_node(), zeros.input_value(0).get_node()
        if (kind := codes.get_element_type().get_type_name()) in SIGNED:
            _, flip = SIGNED[kind]
            if not np.all(zeros.data.view(np.uint8) == flip):
                raise ValueError(f"{codes.get_friendly_name()}: zero points off the middle")
            return codes, scales
    return None


def equal_run(scales: np.ndarray) -> int:
    """The longest run, dividing the groups of a row, over which scales [N, nG] are equal."""
    groups = scales.shape[1]
    for run in range(groups, 1, -1):
        if groups % run == 0:
            runs = scales.reshape(len(scales), groups // run, run)
            if np.array_equal(runs, np.broadcast_to(runs[..., :1], runs.shape)):
                return run
    return 1


def prepare(gguf: str, folder: str) -> dict[str, Any]:
    """Make the folder, where it is not there yet."""
    place = Path(folder)
    if not place.exists():
        with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
            link = Path(scratch) / Path(gguf).name
            link.symlink_to(Path(gguf).absolute())
            genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
            model = ov.Core().read_model(Path(scratch) / "openvino_model.xml")
            total = joined(model)
            out = Path(scratch) / "out"
            out.mkdir()
            ov.save_model(model, out / "openvino_model.xml", compress_to_fp16=True)
            for file in (*Path(scratch).glob("openvino_tokenizer.*"),
                         *Path(scratch).glob("openvino_detokenizer.*")):  # fmt: skip
                file.rename(out / file.name)
            (out / "weight-bytes").write_text(str(total))
            out.rename(place)
    return {"weight_bytes": int((place / "weight-bytes").read_text())}


def main() -> None:
    """Answer until the input ends."""
    pipe: Any = None
    graph: Any = None

    def run(prompt: list[int], count: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
        ids = np.array([prompt], dtype=np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        return pipe.generate(inputs, config)

    def load(folder: str, threads: int) -> dict[str, Any]:
        nonlocal pipe
        start = time.perf_counter()
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = MOST_TOKENS
        scheduler.cache_size = CACHE_GB
        pipe = genai.LLMPipeline(
            folder, "CPU", INFERENCE_NUM_THREADS=threads, scheduler_config=scheduler
        )
        loaded = time.perf_counter()
        run(list(range(FIRST)), 1)
        return {"load_seconds": loaded - start, "first_seconds": time.perf_counter() - start}

    def speed(prompt: list[int], steps: int) -> dict[str, Any]:
        done = run(prompt, steps + 1)
        metrics = done.perf_metrics
        later = metrics.raw_metrics.m_durations  # microseconds of every token but the first
        if len(done.tokens[0]) != steps + 1:
            raise RuntimeError(f"{len(done.tokens[0])} tokens, wanted {steps + 1}")
        return {
            "prefill_seconds": metrics.get_ttft().mean / 1e3,
            "decode_seconds": sum(later[-steps:]) / 1e6 if steps else 0.0,
            "tokens": done.tokens[0],
        }

    def compile_graph(folder: str, threads: int, settings: dict[str, str]) -> dict[str, Any]:
        nonlocal graph
        compiled = ov.Core().compile_model(
            Path(folder) / "openvino_model.xml",
            "CPU",
            {"INFERENCE_NUM_THREADS": threads, **settings},
        )
        graph = compiled.create_infer_request()
        return {"settings": {name: str(compiled.get_property(name)) for name in ARITHMETIC}}

    def logits(ids: list[int], first: int, file: str) -> dict[str, Any]:
        graph.reset_state()
        with open(file, "wb") as out:
            for start, stop in [(0, first + 1), *((i, i + 1) for i in range(first + 1, len(ids)))]:
                found = graph.infer(
                    {
                        "input_ids": np.array([ids[start:stop]], dtype=np.int64),
                        "attention_mask": np.ones((1, stop), dtype=np.int64),
                        "position_ids": np.arange(start, stop, dtype=np.int64)[None],
                        "beam_idx": np.zeros(1, dtype=np.int32),
                    }
                )
                np.ascontiguousarray(found["logits"][0, -1], dtype=np.float32).tofile(out)
        return {"rows": len(ids) - first}

    answer(
        {
            "compile": compile_graph,
            "logits": logits,
            "prepare": prepare,
            "load": load,
            "speed": speed,
            "versions": lambda: {"openvino": genai.get_version()},
        }
    )


if __name__ == "__main__":
    main()
