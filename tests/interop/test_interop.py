"""The demo model's low-bit checkpoints, read by vLLM and by transformers, against our own reader.

vLLM answers in an environment of its own (install_peer.py, vllm-requirements.txt), by subprocess.
Greedy tokens agree while they are equal; where one of the first eight differs, the gap between the
two tokens in our own logits must lie within what bf16 rounding moves a logit there. That rounding
is measured and not chosen: plain bf16 torch against plain fp32 torch on the same weights.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from weightpath import load
from weightpath.checkpoints.low_bit import open_low_bit
from weightpath.engine.generate import encode, stop_ids
from weightpath.engine.load import load_tokenizer
from weightpath.jobs.make import make

pytestmark = pytest.mark.interop

HERE = Path(__file__).resolve().parent
SCHEMES = ("w4g64", "w4g64-asym")
PROMPTS = (
    "What is the capital of France?",
    "Explain in one sentence why the sky is blue.",
    "Explain in one sentence why ice floats on water.",
)
MAX_TOKENS = 12
WANTED = 8  # equal tokens from the start of each answer
TIMEOUT = 300  # seconds for one run of a peer
ROUNDING = 2.0  # how much of plain bf16 torch's own error a reader of the same weights may show


@dataclass(frozen=True)
class Checkpoint:
    """A folder made by us and what our own reader says of it.

    prompts: token ids of each prompt. answers: our greedy token ids. logits: ours, fp32 [T, V] for
    each prompt with its answer. exact, rounded: transformers' on the same ids, from the decompressed
    weights in fp32 and in bf16 arithmetic.
    """

    scheme: str
    folder: Path
    prompts: list[list[int]]
    answers: list[list[int]]
    logits: list[Tensor]
    exact: list[Tensor]
    rounded: list[Tensor]
    facts: dict[str, Any]

    def read(self) -> list[list[int]]:
        """The ids that every set of logits above is for."""
        return [prompt + answer for prompt, answer in zip(self.prompts, self.answers, strict=True)]


def build_checkpoint(scheme: str, folder: Path) -> Path:
    """The demo model at `scheme` with a 16-bit head, made in `folder`."""
    make("demo", folder, scheme, head_bits=16)
    return folder


class PeerFailed(Exception):
    """A peer's script ended with an error; the message is what it wrote to stderr."""


def peer(python: Path | str, script: str, *arguments: object) -> dict[str, Any]:
    """Run a script of this folder and return the JSON object that it prints."""
    ran = subprocess.run(
        [str(python), str(HERE / script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    if ran.returncode:
        raise PeerFailed(f"{script} {' '.join(map(str, arguments))}\n{ran.stderr}")
    return json.loads(ran.stdout.splitlines()[-1])


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
    """Who read a checkpoint, and how."""
    note = ", dequantize=True (else it refuses packed zero points)" if facts["dequantize"] else ""
    return f"transformers {facts['transformers']}, ct {facts['compressed_tensors']}{note}"


def our_weight_hashes(folder: Path) -> dict[str, str]:
    """sha256 of every linear's weight in bf16 as our own reader has it, by the layer's name."""
    checkpoint = open_low_bit(folder)
    hashes = {}
    for name in checkpoint.linears:
        weight = checkpoint.read_qweight(name).dequantize(torch.bfloat16).contiguous()
        hashes[name] = hashlib.sha256(weight.view(torch.uint8).numpy().tobytes()).hexdigest()
    return hashes


def our_answers(folder: Path) -> tuple[list[list[int]], list[list[int]], list[Tensor]]:
    """Prompt ids, greedy answers (one batch, padded on the left) and logits of our own reader."""
    model, tokenizer = load(folder), load_tokenizer(folder)
    prompts = [encode(tokenizer, [{"role": "user", "content": text}])[0] for text in PROMPTS]
    longest = max(map(len, prompts))
    ends = stop_ids(model, tokenizer)
    batch = torch.full((len(prompts), longest), ends[0])
    mask = torch.zeros_like(batch)
    for row, ids in enumerate(prompts):
        batch[row, longest - len(ids) :] = ids
        mask[row, longest - len(ids) :] = 1
    with torch.inference_mode():
        output = model.generate(  # type: ignore[operator]
            batch,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=ends,
            pad_token_id=ends[0],
        )[:, longest:]
        answers = [until_stop(row.tolist(), ends) for row in output]
        logits = [
            model(torch.cat((ids, torch.tensor(answer)))[None], use_cache=False).logits[0].float()
            for ids, answer in zip(prompts, answers, strict=True)
        ]
    return [ids.tolist() for ids in prompts], answers, logits


def until_stop(tokens: list[int], ends: list[int]) -> list[int]:
    """Tokens up to and with the first that ends a reply; padding follows it."""
    stops = [at for at, token in enumerate(tokens) if token in ends]
    return tokens[: stops[0] + 1] if stops else tokens


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """checkpoint(scheme): built and answered once a session."""

    @cache
    def made(scheme: str) -> Checkpoint:
        folder = build_checkpoint(scheme, tmp_path_factory.mktemp("interop") / scheme)
        prompts, answers, logits = our_answers(folder)
        ids = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        exact, rounded, facts = read_by_transformers(folder, ids)
        return Checkpoint(scheme, folder, prompts, answers, logits, exact, rounded, facts)

    return made


@pytest.fixture(scope="session")
def damaged(checkpoint: Callable[[str], Checkpoint]) -> Path:
    """A copy of the symmetric checkpoint whose packed words have their nibbles in reverse order."""
    good = checkpoint("w4g64").folder
    folder = good.with_name("damaged")
    shutil.copytree(good, folder)
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        for name, words in tensors.items():
            if name.endswith("weight_packed"):
                nibbles = [(words >> (4 * place)) & 15 for place in range(8)]
                mixed = torch.zeros_like(words)
                for place, nibble in enumerate(nibbles):
                    mixed |= nibble << (4 * (7 - place))
                tensors[name] = mixed
        save_file(tensors, shard, metadata={"format": "pt"})
    return folder


def worst(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Largest difference of logits over all prompts, positions and tokens."""
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def mean(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Mean difference of logits over all prompts, positions and tokens."""
    gaps = [(a - b).abs().flatten() for a, b in zip(found, wanted, strict=True)]
    return float(torch.cat(gaps).mean())


def check_logits(found: list[Tensor], reference: Checkpoint, who: str) -> str:
    """Fail unless `found` errs by at most ROUNDING times plain bf16 torch's own error, both the
    largest and the mean, against fp32 arithmetic on the same weights."""
    row = f"{reference.scheme:11} {who}: |logits - fp32|"
    wrong = []
    for label, measure in (("largest", worst), ("mean", mean)):
        floor, error = measure(reference.rounded, reference.exact), measure(found, reference.exact)
        row += f" {label} {error:.4f} (plain bf16 torch {floor:.4f})"
        if not 0 < error <= ROUNDING * floor:
            wrong.append(f"{label} allowed 0 .. {ROUNDING * floor:.4f}")
    assert not wrong, f"{row}; {', '.join(wrong)}"
    return f"{row}; from transformers in bf16, largest {worst(found, reference.rounded):.4f}"


def check_greedy(answers: list[dict[str, Any]], reference: Checkpoint, who: str) -> list[str]:
    """Fail unless each answer agrees for WANTED tokens, or parts from ours at a near tie."""
    rows, wrong = [], []
    for index, answer in enumerate(answers):
        ours, theirs = reference.answers[index], answer["token_ids"]
        same = next(
            (at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
            min(len(ours), len(theirs)),
        )
        row = f"{reference.scheme:11} {who}, prompt {index + 1}: {same} of {len(ours)} tokens equal"
        if same < len(ours) and same < len(theirs):
            at = len(reference.prompts[index]) + same - 1
            row_ours = reference.logits[index][at]
            gap = float(row_ours[ours[same]] - row_ours[theirs[same]])
            bound = float((reference.rounded[index][at] - reference.exact[index][at]).abs().max())
            row += (
                f"; token {same + 1} is {theirs[same]}, ours {ours[same]}: our margin {gap:.3f}, "
                f"theirs {answer['margins'][same]:.3f}, bf16 rounding moves a logit there by up to {bound:.3f}"
            )
            if same < WANTED and gap > bound:
                wrong.append(row)
        elif same < min(WANTED, len(ours)) or len(theirs) > len(ours):
            wrong.append(f"{row}; one of the two stopped: ours {ours}, theirs {theirs}")
        rows.append(row)
    assert not wrong, "\n".join(wrong)
    return rows


def vllm_answers(python: Path, folder: Path) -> dict[str, Any]:
    prompts = folder.with_suffix(".prompts.json")
    prompts.write_text(json.dumps(PROMPTS), encoding="utf-8")
    return peer(python, "vllm_generate.py", folder, prompts, MAX_TOKENS)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_weight_that_transformers_decompresses_is_ours_to_the_bit(
    scheme: str, checkpoint: Callable[[str], Checkpoint], table: list[str]
) -> None:
    reference = checkpoint(scheme)
    weights = reference.facts["weights"]
    assert weights == our_weight_hashes(reference.folder)
    table.append(
        f"{scheme:11} {versions(reference.facts)}: {len(weights)} linears equal bit for bit"
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_logits_match_ours_within_bf16_rounding(
    scheme: str, checkpoint: Callable[[str], Checkpoint], table: list[str]
) -> None:
    reference = checkpoint(scheme)
    table.append(check_logits(reference.logits, reference, "weightpath"))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_older_transformers_of_the_peer_reads_the_same_weights(
    scheme: str,
    checkpoint: Callable[[str], Checkpoint],
    peer_python: Path,
    table: list[str],
) -> None:
    reference = checkpoint(scheme)
    found, facts = transformers_logits(peer_python, reference.folder, reference.read(), "bfloat16")
    assert facts["weights"] == our_weight_hashes(reference.folder)
    table.append(check_logits(found, reference, versions(facts)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_vllm_greedy_tokens_agree_with_ours_for_the_first_eight(
    scheme: str,
    checkpoint: Callable[[str], Checkpoint],
    peer_python: Path,
    table: list[str],
) -> None:
    reference = checkpoint(scheme)
    found = vllm_answers(peer_python, reference.folder)
    assert [answer["prompt_ids"] for answer in found["answers"]] == reference.prompts
    assert found["packed"] > 0, "vLLM holds no packed weight: it did not read the checkpoint's"
    rows = check_greedy(found["answers"], reference, f"vLLM {found['vllm']}")
    table.append(
        f"{scheme:11} vLLM {found['vllm']}: {found['packed']} packed linears on "
        f"{', '.join(found['kernels'])}, loaded in {found['load_seconds']:.0f} s, answered in "
        f"{found['generate_seconds']:.0f} s"
    )
    table.extend(rows)
    table.extend(f"{'':11}   {answer['text']!r}" for answer in found["answers"])


def test_words_packed_in_another_order_fail_the_weight_and_logit_checks(
    checkpoint: Callable[[str], Checkpoint], damaged: Path
) -> None:
    reference = checkpoint("w4g64")
    found, facts = transformers_logits(sys.executable, damaged, reference.read(), "bfloat16")
    assert facts["weights"] != reference.facts["weights"]
    with pytest.raises(AssertionError, match="allowed"):
        check_logits(found, reference, "damaged")


def test_words_packed_in_another_order_fail_the_greedy_check(
    checkpoint: Callable[[str], Checkpoint], damaged: Path, peer_python: Path
) -> None:
    found = vllm_answers(peer_python, damaged)
    with pytest.raises(AssertionError, match="tokens equal"):
        check_greedy(found["answers"], checkpoint("w4g64"), "damaged")
