"""GGUF files that we write, in llama.cpp: the same greedy tokens, the same log probabilities.

    demo model -> w4g64      -> GGUF Q4_0, the same weights to the bit
    demo model -> w4g64-asym -> GGUF Q4_1, whose minimums -(s*z) are rounded to fp16

llama.cpp comes in the wheel `xllamacpp`, which is llama.cpp's server built for CPUs: llama-cpp-python
has no wheels, and takes two cores 12 to 25 minutes to build. The reference is our own reading of the
same GGUF file, in fp32. llama.cpp multiplies Q4 blocks with activations rounded to int8 in blocks of
32, so that is the rounding it is held to: it is done here in plain torch, and what it moves is the
measure for ties and for errors. What llama.cpp rounds besides (sums of Q8_1 blocks, the head's
input, to fp16) is far smaller, and only the head's is done here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import Checkpoint, Reference, agreed, check_errors, check_greedy, greedy, logits
from peers import llama_answers
from torch import Tensor, nn

from weightpath import load
from weightpath.checkpoints.gguf import GGUFCheckpoint
from weightpath.engine.load import load_float, load_tokenizer
from weightpath.jobs.convert import convert

pytestmark = pytest.mark.interop

SCHEMES = {"w4g64": "Q4_0", "w4g64-asym": "Q4_1"}
BLOCK = 32


@pytest.fixture(scope="module")
def reference(checkpoint: Callable[[str], Checkpoint]) -> Callable[[str], Reference]:
    """reference(scheme): a GGUF file of the checkpoint (its `folder`), and our reading of it."""

    @cache
    def made(scheme: str) -> Reference:
        source = checkpoint(scheme).folder
        done = convert(str(source), "gguf", source.with_suffix(".gguf"))
        assert {item.target for item in done.linears} == {SCHEMES[scheme]}
        assert scheme != "w4g64" or not done.lossy
        prompts, answers, own = greedy(
            load(done.folder, dtype=torch.float32), load_tokenizer(source)
        )
        plain = load_float(GGUFCheckpoint(done.folder), torch.float32, torch.float32)
        ids = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        exact = logits(plain, ids)
        round_activations(plain)
        rounded = logits(plain, ids)
        rounding = "rounding activations to int8"
        return Reference(
            SCHEMES[scheme], done.folder, prompts, answers, own, exact, rounded, rounding
        )

    return made


@pytest.fixture(scope="module")
def llama(
    reference: Callable[[str], Reference], peer_python: Callable[[str], Path]
) -> Callable[[str], dict[str, Any]]:
    """llama(scheme): llama.cpp's answers, asked for once."""
    return cache(lambda scheme: llama_answers(peer_python("llama"), reference(scheme).folder))


def int8_blocks(values: Tensor) -> Tensor:
    """Values [.., K] as llama.cpp's Q8_0 holds them: int8 in blocks of 32, scale max|x| / 127 fp16."""
    blocks = values.unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    codes = torch.round(blocks / torch.where(scales == 0, 1.0, scales))
    return (codes * scales.half().float()).flatten(-2)


def round_activations(model: nn.Module) -> None:
    """From now on linears of an fp32 model read rounded inputs: int8 blocks, fp16 for the head."""
    head = model.get_output_embeddings()  # type: ignore[operator]

    def rounding(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (inputs[0].half().float() if module is head else int8_blocks(inputs[0]),)

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(rounding)


def check_log_probabilities(answers: list[dict[str, Any]], reference: Reference, who: str) -> str:
    """Fail unless llama.cpp's log probabilities err by at most ROUNDING times plain torch with the
    same rounding, against fp32; of the tokens it reports, at each step that read what ours did."""
    sets: tuple[list[Tensor], ...] = ([], [], [])
    for index, answer in enumerate(answers):
        ours, theirs = reference.answers[index], answer["token_ids"]
        first = len(reference.prompts[index]) - 1
        for step in range(min(agreed(ours, theirs) + 1, len(ours), len(theirs))):
            tokens, values = zip(*answer["top"][step], strict=True)
            sets[0].append(torch.tensor(values))
            for own, kept in zip((reference.exact, reference.rounded), sets[1:], strict=True):
                kept.append(own[index][first + step].log_softmax(-1)[list(tokens)])
    label = f"{reference.scheme:11} {who}, {len(sets[0])} steps: |log p - fp32|"
    return check_errors(label, *sets, "plain torch, int8 activations")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_llama_cpp_writes_our_greedy_tokens_from_a_gguf_of_ours(
    scheme: str,
    reference: Callable[[str], Reference],
    llama: Callable[[str], dict[str, Any]],
    table: list[str],
) -> None:
    found = llama(scheme)
    rows = check_greedy(
        found["answers"], reference(scheme), f"llama.cpp (xllamacpp {found['llama_cpp']})"
    )
    table.extend(rows)
    table.extend(f"{'':11}   {answer['text']!r}" for answer in found["answers"])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_llama_cpp_log_probabilities_are_ours_within_its_int8_activations(
    scheme: str,
    reference: Callable[[str], Reference],
    llama: Callable[[str], dict[str, Any]],
    table: list[str],
) -> None:
    answers = llama(scheme)["answers"]
    table.append(check_log_probabilities(answers, reference(scheme), "llama.cpp"))


def test_a_gguf_of_words_packed_in_another_order_fails_both_checks(
    damaged: Path, reference: Callable[[str], Reference], peer_python: Callable[[str], Path]
) -> None:
    wrong = convert(str(damaged), "gguf", damaged.with_suffix(".gguf")).folder
    answers = llama_answers(peer_python("llama"), wrong)["answers"]
    with pytest.raises(AssertionError, match="tokens equal"):
        check_greedy(answers, reference("w4g64"), "damaged")
    with pytest.raises(AssertionError, match="allowed"):
        check_log_probabilities(answers, reference("w4g64"), "damaged")
