"""What our own reader says of a checkpoint, and whether a peer agrees with it.

Greedy tokens agree while they are equal; where one of the first WANTED differs, the gap between the
two tokens in our own logits must lie within what the peer's rounding moves a logit there. That
rounding is measured and not chosen: plain torch with the same rounding against plain fp32 torch, on
the same weights. At least one answer must be equal for WANTED tokens outright.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peers import MAX_TOKENS, PROMPTS
from torch import Tensor

from weightpath.checkpoints.low_bit import open_low_bit
from weightpath.engine.generate import encode, stop_ids

WANTED = 8  # equal tokens from the start of each answer
ROUNDING = 2.0  # how much of plain rounded torch's own error a reader of the same weights may show


@dataclass(frozen=True)
class Reference:
    """A model of ours and what is to be expected of a peer that reads it.

    prompts: token ids of each prompt. answers: our greedy token ids. logits: ours, fp32 [T, V] for
    each prompt with its answer. exact, rounded: on the same ids, in fp32 and with the peer's
    rounding, whose name is `rounding`.
    """

    scheme: str
    folder: Path
    prompts: list[list[int]]
    answers: list[list[int]]
    logits: list[Tensor]
    exact: list[Tensor]
    rounded: list[Tensor]
    rounding: str

    def read(self) -> list[list[int]]:
        """The ids that every set of logits above is for."""
        return [prompt + answer for prompt, answer in zip(self.prompts, self.answers, strict=True)]


@dataclass(frozen=True)
class Checkpoint(Reference):
    """A compressed-tensors folder made by us. facts: what transformers says of its weights."""

    facts: dict[str, Any]


def relabelled(source: Path, folder: Path, version: str) -> Path:
    """A copy of a GPTQ folder that claims another zero convention in every config it has."""
    shutil.copytree(source, folder)
    for path in (folder / "config.json", folder / "quantize_config.json"):
        config = json.loads(path.read_text(encoding="utf-8"))
        settings = config.get("quantization_config", config)
        settings["format"] = settings["checkpoint_format"] = version
        path.write_text(json.dumps(config), encoding="utf-8")
    return folder


def weight_hashes(folder: Path) -> dict[str, str]:
    """sha256 of every linear's weight in bf16 as our own reader has it, by the layer's name."""
    checkpoint = open_low_bit(folder)
    hashes = {}
    for name in checkpoint.linears:
        weight = checkpoint.read_qweight(name).dequantize(torch.bfloat16).contiguous()
        hashes[name] = hashlib.sha256(weight.view(torch.uint8).numpy().tobytes()).hexdigest()
    return hashes


def greedy(model: Any, tokenizer: Any) -> tuple[list[list[int]], list[list[int]], list[Tensor]]:
    """Ids of PROMPTS, greedy answers of our model (one batch, padded on the left), its logits."""
    prompts = [encode(tokenizer, [{"role": "user", "content": text}])[0] for text in PROMPTS]
    longest = max(map(len, prompts))
    ends = stop_ids(model, tokenizer)
    batch = torch.full((len(prompts), longest), ends[0])
    mask = torch.zeros_like(batch)
    for row, ids in enumerate(prompts):
        batch[row, longest - len(ids) :] = ids
        mask[row, longest - len(ids) :] = 1
    with torch.inference_mode():
        output = model.generate(
            batch,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=ends,
            pad_token_id=ends[0],
        )[:, longest:]
    asked = [ids.tolist() for ids in prompts]
    answers = [until_stop(row.tolist(), ends) for row in output]
    return asked, answers, logits(model, [a + b for a, b in zip(asked, answers, strict=True)])


def logits(model: Any, ids: list[list[int]]) -> list[Tensor]:
    """Logits fp32 [T, V] of each list of ids, in one pass."""
    with torch.inference_mode():
        return [model(torch.tensor([row]), use_cache=False).logits[0].float() for row in ids]


def until_stop(tokens: list[int], ends: list[int]) -> list[int]:
    """Tokens up to and with the first that ends a reply; padding follows it."""
    stops = [at for at, token in enumerate(tokens) if token in ends]
    return tokens[: stops[0] + 1] if stops else tokens


def agreed(ours: list[int], theirs: list[int]) -> int:
    """How many tokens are equal from the start."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def worst(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Largest difference over all tensors."""
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def mean(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Mean difference over all tensors."""
    gaps = [(a - b).abs().flatten() for a, b in zip(found, wanted, strict=True)]
    return float(torch.cat(gaps).mean())


def check_errors(
    label: str, found: list[Tensor], exact: list[Tensor], rounded: list[Tensor], plain: str
) -> str:
    """Fail unless `found` errs by at most ROUNDING times the error of `rounded`, both the largest
    and the mean, against `exact`. plain: what `rounded` is called in the row that is returned."""
    row, wrong = label, []
    for kind, measure in (("largest", worst), ("mean", mean)):
        floor, error = measure(rounded, exact), measure(found, exact)
        row += f" {kind} {error:.4f} ({plain} {floor:.4f})"
        if not 0 < error <= ROUNDING * floor:
            wrong.append(f"{kind} allowed 0 .. {ROUNDING * floor:.4f}")
    assert not wrong, f"{row}; {', '.join(wrong)}"
    return row


def check_greedy(answers: list[dict[str, Any]], reference: Reference, who: str) -> list[str]:
    """Fail unless each answer agrees for WANTED tokens, or parts from ours at a near tie, and one
    of them does agree."""
    assert [answer["prompt_ids"] for answer in answers] == reference.prompts
    rows, wrong, equal = [], [], 0
    for index, answer in enumerate(answers):
        ours, theirs = reference.answers[index], answer["token_ids"]
        same = agreed(ours, theirs)
        equal += same >= WANTED
        row = f"{reference.scheme:11} {who}, prompt {index + 1}: {same} of {len(ours)} tokens equal"
        if same < len(ours) and same < len(theirs):
            at = len(reference.prompts[index]) + same - 1
            row_ours = reference.logits[index][at]
            gap = float(row_ours[ours[same]] - row_ours[theirs[same]])
            bound = float((reference.rounded[index][at] - reference.exact[index][at]).abs().max())
            row += (
                f"; token {same + 1} is {theirs[same]}, ours {ours[same]}: our margin {gap:.3f}, "
                f"theirs {answer['margins'][same]:.3f}, {reference.rounding} moves a logit there "
                f"by up to {bound:.3f}"
            )
            if same < WANTED and gap > bound:
                wrong.append(row)
        elif same < min(WANTED, len(ours)) or len(theirs) > len(ours):
            wrong.append(f"{row}; one of the two stopped: ours {ours}, theirs {theirs}")
        rows.append(row)
    if not equal:
        wrong.append(f"{who}: no answer of {len(answers)} has its first {WANTED} tokens equal")
    assert not wrong, "\n".join(wrong)
    return rows
