"""The demo model's low-bit checkpoints, read by vLLM and by transformers, against our own reader.

vLLM answers in an environment of its own (install_peer.py, vllm-requirements.txt), by subprocess.
What is compared, and what is allowed, is in agreement.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from agreement import Checkpoint, check_errors, check_greedy, weight_hashes, worst
from peers import transformers_logits, versions, vllm_answers
from torch import Tensor

pytestmark = pytest.mark.interop

SCHEMES = ("w4g64", "w4g64-asym")


def check_logits(found: list[Tensor], reference: Checkpoint, who: str) -> str:
    """Fail unless `found` errs by at most ROUNDING times plain bf16 torch's own error."""
    row = check_errors(
        f"{reference.scheme:11} {who}: |logits - fp32|",
        found,
        reference.exact,
        reference.rounded,
        "plain bf16 torch",
    )
    return f"{row}; from transformers in bf16, largest {worst(found, reference.rounded):.4f}"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_weight_that_transformers_decompresses_is_ours_to_the_bit(
    scheme: str, checkpoint: Callable[[str], Checkpoint], table: list[str]
) -> None:
    reference = checkpoint(scheme)
    weights = reference.facts["weights"]
    assert weights == weight_hashes(reference.folder)
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
    peer_python: Callable[[str], Path],
    table: list[str],
) -> None:
    reference = checkpoint(scheme)
    found, facts = transformers_logits(
        peer_python("vllm"), reference.folder, reference.read(), "bfloat16"
    )
    assert facts["weights"] == weight_hashes(reference.folder)
    table.append(check_logits(found, reference, versions(facts)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_vllm_greedy_tokens_agree_with_ours_for_the_first_eight(
    scheme: str,
    checkpoint: Callable[[str], Checkpoint],
    peer_python: Callable[[str], Path],
    table: list[str],
) -> None:
    reference = checkpoint(scheme)
    found = vllm_answers(peer_python("vllm"), reference.folder)
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
    checkpoint: Callable[[str], Checkpoint], damaged: Path, peer_python: Callable[[str], Path]
) -> None:
    found = vllm_answers(peer_python("vllm"), damaged)
    with pytest.raises(AssertionError, match="tokens equal"):
        check_greedy(found["answers"], checkpoint("w4g64"), "damaged")
