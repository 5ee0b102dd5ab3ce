"""The native engine alone, on random weights in two shapes: speeds by threads, and time by phase.

    python benchmarks/native_steps.py [--threads 2,8,16] [--models 135m,1b] [--rounds 5] [--write]

135m is SmolLM2's shape, 1b a 1B Llama's (decode_models.py); linears w4g64, the head int8. Prefill of
512 tokens into an empty cache; decode after 16 tokens and after 2,048; beside them the read bandwidth
of as many threads over 4 GiB, past a large L3. Median, lowest and highest round; phases are of the
calling thread, milliseconds of a prefill and microseconds of a decoded token, "waiting" at barriers.
Needs no peer, so it runs where none can be installed. Run it under GOMP_SPINCOUNT=10000.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from common import finish
from weightpath.bench.timing import Timing
from weightpath.engine.decode import NativeModel, Session
from weightpath.kernels import cpu
from weightpath.nn.int4_linear import Int4Linear
from weightpath.nn.int8_linear import Int8Linear
from weightpath.nn.swap import replace_module, set_activation_bits
from weightpath.scheme import Scheme

SHAPES = {
    "135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    },
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 49152,
    },
}  # fmt: skip
GROUP_SIZE = 64
SPREAD = 0.02
"""Standard deviation of a weight, transformers' own for this family."""
PROMPT, SHORT, DEEP, STEPS = 512, 16, 2048, 48
READ_BYTES = 4 << 30


def random_model(name: str) -> LlamaForCausalLM:
    """A Llama of that shape whose linears hold random codes; 4.6 and 73 are a code's deviation."""
    torch.set_default_dtype(torch.bfloat16)
    config = LlamaConfig(max_position_embeddings=8192, tie_word_embeddings=False, **SHAPES[name])
    model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    for place, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        n, k = module.weight.shape
        if place == "lm_head":
            codes = torch.randint(-127, 128, (n, k), dtype=torch.int8)
            low: nn.Module = Int8Linear(codes, torch.full((n,), SPREAD / 73))
        else:
            packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
            scales = torch.full((n, k // GROUP_SIZE), SPREAD / 4.6, dtype=torch.bfloat16)
            low = Int4Linear(packed, scales, None, Scheme(4, GROUP_SIZE))
        replace_module(model, place, low)
    return model


def rates(call: Callable[[], object], amount: float, rounds: int, unit: str) -> Timing:
    """amount a second, of so many rounds after a first one that is not counted."""
    call()
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        found.append(amount / (time.perf_counter() - start))
    return Timing.of(found, unit)


def measure(model: LlamaForCausalLM, name: str, bits: int, rounds: int) -> dict[str, Any]:
    """One row: speeds and phases of one model, activation width and the present thread count."""
    set_activation_bits(model, bits)
    native = NativeModel(model)
    session, ids = native.session(4096), torch.randint(0, 49152, (DEEP,)).tolist()

    def prefill() -> None:
        session.truncate(0)
        session.extend(ids[:PROMPT])

    def after(length: int) -> Callable[[], None]:
        return lambda: decode(session, length, ids)

    unit = "tokens/s"
    row: dict[str, Any] = {"model": name, "activation_bits": bits, "chunk": native.chunk,
                           "threads": torch.get_num_threads(), "bytes": native.bytes_per_token}  # fmt: skip
    row["prefill"] = _three(rates(prefill, PROMPT, rounds, unit))
    for key, length in (("decode", SHORT), ("decode_deep", DEEP)):
        session.truncate(0)
        session.extend(ids[:length])
        row[key] = _three(rates(after(length), STEPS, rounds, unit))
    native.profile()
    prefill()
    row["prefill_ms"] = {phase: ns / 1e6 for phase, ns in native.nanoseconds().items()}
    session.truncate(SHORT)
    native.profile()
    decode(session, SHORT, ids)
    row["decode_us"] = {phase: ns / 1e3 / STEPS for phase, ns in native.nanoseconds().items()}
    return row


def decode(session: Session, length: int, ids: list[int]) -> None:
    """STEPS tokens after `length`."""
    session.truncate(length)
    for token in ids[:STEPS]:
        session.extend([token])


def _three(timing: Timing) -> list[float]:
    return [timing.median, timing.low, timing.high]


def show(row: dict[str, Any], reads: list[float]) -> None:
    """A row on stdout, its phases under it."""
    speeds = "  ".join(
        f"{key} {row[key][0]:.0f} ({row[key][1]:.0f} to {row[key][2]:.0f})"
        for key in ("prefill", "decode", "decode_deep")
    )
    rate = row["decode"][0] * row["bytes"] / 1e9
    print(
        f"{row['model']} {row['threads']} threads W4A{row['activation_bits']}: {speeds} tokens/s; "
        f"decode reads {rate:.0f} GB/s of {reads[0]:.0f}"
    )
    for key in ("prefill_ms", "decode_us"):
        print(f"  {key}", {phase: round(value, 1) for phase, value in row[key].items()}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", default=str(torch.get_num_threads()))
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    memory, module = cpu.fresh_memory(READ_BYTES).fill_(1), cpu.extension()
    rows = []
    for name in arguments.models.split(","):
        model = random_model(name)
        for threads in (int(count) for count in arguments.threads.split(",")):
            torch.set_num_threads(threads)
            reads = _three(
                rates(
                    lambda count=threads: module.read_all(
                        memory.data_ptr(), memory.numel(), count
                    ),
                    READ_BYTES / 1e9, 3, "GB/s",
                )
            )  # fmt: skip
            for bits in (8, 16):
                row = {**measure(model, name, bits, arguments.rounds), "read_gb_per_s": reads}
                show(row, reads)
                rows.append(row)
    body = {"instruction_set": cpu.instruction_set_here()[0], "rows": rows}
    if arguments.write:
        finish("native-steps", body)
    else:
        print(json.dumps({"kind": "native-steps", **body}))


if __name__ == "__main__":
    main()
