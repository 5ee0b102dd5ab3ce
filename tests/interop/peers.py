"""Running peers: each in an environment of its own, by a script of this folder, by subprocess."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

HERE = Path(__file__).resolve().parent
PROMPTS = (
    "What is the capital of France?",
    "Explain in one sentence why the sky is blue.",
    "Explain in one sentence why ice floats on water.",
    "Repeat this sentence: The quick brown fox jumps over the lazy dog.",
)
"""The last has no near ties: each of its first eight tokens leads by 2 logits or more."""
MAX_TOKENS = 12
TIMEOUT = 300  # seconds for one run of a peer


class PeerFailed(Exception):
    """A peer's script ended with an error; the message is what it wrote to stderr."""


def peer(python: Path | str, script: str, *arguments: object) -> dict[str, Any]:
    """Run a script of this folder, in a scratch folder, and return the JSON object that it prints.

    Paths among the arguments are absolute. GPTQModel leaves a `logs` folder where it runs.
    """
    with tempfile.TemporaryDirectory() as scratch:
        ran = subprocess.run(
            [str(Path(python).absolute()), str(HERE / script), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
            cwd=scratch,
        )
    if ran.returncode:
        raise PeerFailed(f"{script} {' '.join(map(str, arguments))}\n{ran.stderr}")
    return json.loads(ran.stdout.splitlines()[-1])


def answers(python: Path, script: str, model: Path) -> dict[str, Any]:
    """What a generating script says of PROMPTS, greedily, up to MAX_TOKENS each."""
    prompts = model.with_suffix(".prompts.json")
    prompts.write_text(json.dumps(PROMPTS), encoding="utf-8")
    return peer(python, script, model, prompts, MAX_TOKENS)


def vllm_answers(python: Path, folder: Path) -> dict[str, Any]:
    """vLLM's answers from a folder."""
    return answers(python, "vllm_generate.py", folder)


def llama_answers(python: Path, gguf: Path) -> dict[str, Any]:
    """llama.cpp's answers from a GGUF file."""
    return answers(python, "llama_generate.py", gguf)


def transformers_logits(
    python: Path | str, folder: Path, ids: list[list[int]], dtype: str, *flags: str
) -> tuple[list[Tensor], dict[str, Any]]:
    """Logits fp32 [T, V] for every list of ids, and what read them."""
    tokens, out = folder.with_suffix(".tokens.json"), folder.with_suffix(".logits.safetensors")
    tokens.write_text(json.dumps(ids), encoding="utf-8")
    facts = peer(python, "transformers_logits.py", folder, tokens, out, "--dtype", dtype, *flags)
    found = load_file(out)
    return [found[f"logits.{index}"] for index in range(len(ids))], facts


def read_by_transformers(
    folder: Path, ids: list[list[int]]
) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
    """Logits in fp32 and in bf16 arithmetic by this environment's transformers, and what read them.

    compressed-tensors 0.18 to 0.20 gives a packed zero point the shape of an unpacked one while the
    model has no memory yet, so transformers refuses the file's: "size mismatch". Decompressing each
    tensor as it is read goes round that, and the table says so. Any other refusal is raised.
    """
    flags: tuple[str, ...] = ()
    try:
        rounded, facts = transformers_logits(sys.executable, folder, ids, "bfloat16")
    except PeerFailed as refusal:
        if "weight_zero_point" not in str(refusal) or "MISMATCH" not in str(refusal):
            raise
        flags = ("--dequantize",)
        rounded, facts = transformers_logits(sys.executable, folder, ids, "bfloat16", *flags)
    exact, _ = transformers_logits(sys.executable, folder, ids, "float32", *flags)
    return exact, rounded, facts


def versions(facts: dict[str, Any]) -> str:
    """Which transformers read a checkpoint, and how."""
    note = ", dequantize=True (else it refuses packed zero points)" if facts["dequantize"] else ""
    return f"transformers {facts['transformers']}, ct {facts['compressed_tensors']}{note}"
