"""ONNX Runtime's MatMulNBits, timed in its own process; run by the python of .venv-ort.

    y[m, n] = sum_k scale[n, k // group] * (code[n, k] - 8) * x[m, k]        fp32 x, scales and y

Requests, one JSON object a line, and their answers:

    {"do": "make", "name", "n", "k", "group_size", "level", "copies", "threads"}
        -> {"error_mean"}      a session of so many products, each with a weight of its own
    {"do": "time", "name", "rows", "calls", "clock"}
        -> {"seconds", "calls"}
    {"do": "drop"} -> {}       every session is let go
    {"do": "versions"} -> {"onnxruntime"}

One run of a session is a product with every copy on the same x, so weights come from past the
caches and neither Python nor a session's start is in a product's time; `calls` is rounded up to
whole runs. Every copy has codes of its own: of equal ones a session keeps one, and 31 GB/s from the
cache were taken for 14 from memory. All copies write the same y. `level` is accuracy_level: 4 lets the kernel quantize
x to int8, 0 keeps fp32. error_mean: mean |y - exact| over mean |exact| for two rows of the first
copy, from numpy; it shows what a level did.

The threads are the session's and stop spinning when a run ends, or they would take the cores of
whoever has the next turn. With one thread everything runs on the calling one.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import onnxruntime  # pyright: ignore[reportMissingImports]
from loop import answer
from onnx import TensorProto, helper, numpy_helper  # pyright: ignore[reportMissingImports]

CLOCKS = {"thread": time.thread_time, "wall": time.perf_counter}
OPSET, CONTRIB_OPSET, IR = 21, 1, 10


class Products:
    """A session of `copies` products of one shape, and buffers for the rows asked for last."""

    def __init__(
        self, n: int, k: int, group_size: int, level: int, copies: int, threads: int
    ) -> None:
        self.n, self.k, self.copies = n, k, copies
        draw = np.random.default_rng(0)
        shape = (n, k // group_size, group_size // 2)
        self.scales = (draw.random((n, k // group_size), dtype=np.float32) * 0.01).astype("f4")
        parts, nodes, outputs = [], [], []
        for copy in range(copies):
            codes = draw.integers(0, 256, shape, dtype=np.uint8)
            if copy == 0:
                self.codes = codes
            parts.append(numpy_helper.from_array(codes, f"codes{copy}"))
            parts.append(numpy_helper.from_array(self.scales, f"scales{copy}"))
            nodes.append(
                helper.make_node(
                    "MatMulNBits",
                    ["x", f"codes{copy}", f"scales{copy}"],
                    [f"y{copy}"],
                    domain="com.microsoft",
                    K=k,
                    N=n,
                    bits=4,
                    block_size=group_size,
                    accuracy_level=level,
                )
            )
            outputs.append(helper.make_tensor_value_info(f"y{copy}", TensorProto.FLOAT, ["m", n]))
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["m", k])
        opsets = [
            helper.make_opsetid("", OPSET),
            helper.make_opsetid("com.microsoft", CONTRIB_OPSET),
        ]
        graph = helper.make_graph(nodes, "products", [x], outputs, parts)
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
        options.add_session_config_entry("session.force_spinning_stop", "1")
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self.binding, self.rows = None, 0

    def bind(self, rows: int) -> None:
        """x and y of so many rows; kept until another number is asked for."""
        if rows == self.rows:
            return
        self.rows = rows
        self.x = np.random.default_rng(1).standard_normal((rows, self.k), dtype=np.float32)
        self.y = np.empty((rows, self.n), dtype=np.float32)
        self.binding = self.session.io_binding()
        self.binding.bind_cpu_input("x", self.x)
        for copy in range(self.copies):
            self.binding.bind_output(
                f"y{copy}", "cpu", 0, np.float32, self.y.shape, self.y.ctypes.data
            )

    def time(self, rows: int, calls: int, clock: str) -> dict[str, Any]:
        """Seconds of as many whole runs as hold `calls` products."""
        self.bind(rows)
        runs, now = -(-calls // self.copies), CLOCKS[clock]
        start = now()
        for _ in range(runs):
            self.session.run_with_iobinding(self.binding)
        return {"seconds": now() - start, "calls": runs * self.copies}

    def error_mean(self) -> float:
        """How far two rows are from the product of the same weight in fp64."""
        self.bind(2)
        self.session.run_with_iobinding(self.binding)
        codes = np.stack((self.codes & 15, self.codes >> 4), axis=-1)
        codes = codes.reshape(self.n, self.scales.shape[1], -1).astype("f4") - 8
        weight = (codes * self.scales[:, :, None]).reshape(self.n, self.k)
        exact = self.x.astype("f8") @ weight.astype("f8").T
        return float(np.abs(self.y - exact).mean() / np.abs(exact).mean())


def main() -> None:
    """Answer until the input ends."""
    held: dict[str, Products] = {}

    def make(name: str, **shape: int) -> dict[str, Any]:
        held[name] = Products(**shape)
        return {"error_mean": held[name].error_mean()}

    def drop() -> dict[str, Any]:
        held.clear()
        return {}

    answer(
        {
            "make": make,
            "time": lambda name, **asked: held[name].time(**asked),
            "drop": drop,
            "versions": lambda: {"onnxruntime": onnxruntime.__version__},
        }
    )


if __name__ == "__main__":
    main()
