"""AWQ and GPTQ checkpoints that we write, converted to compressed-tensors, in vLLM.

    demo model -> w4g64-asym -> AWQ gemm, or GPTQ v1 -> compressed-tensors -> vLLM

Every weight is the same to the bit at each step, so our answers from the first folder are the
reference for the last. The scales were bf16 to begin with, which fp16 holds and vLLM's bf16 takes
back unchanged; none of the zero points is 0, which v1 has no field for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from agreement import Checkpoint, check_greedy, relabelled, weight_hashes
from peers import vllm_answers

from weightpath.checkpoints.low_bit import open_low_bit
from weightpath.jobs.convert import convert

pytestmark = pytest.mark.interop

SCHEME = "w4g64-asym"
FORMATS = {"awq": "AWQ gemm", "gptq": "GPTQ v1"}


@pytest.fixture(scope="module")
def written(
    checkpoint: Callable[[str], Checkpoint], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The asymmetric checkpoint in each of FORMATS."""
    source, folder = checkpoint(SCHEME).folder, tmp_path_factory.mktemp("written")
    for to in FORMATS:
        convert(str(source), to, folder / to, exact_only=True)
    return {to: folder / to for to in FORMATS}


@pytest.mark.parametrize("to", FORMATS)
def test_vllm_writes_our_greedy_tokens_from_a_file_of_ours_that_was_converted_back(
    to: str,
    written: dict[str, Path],
    checkpoint: Callable[[str], Checkpoint],
    peer_python: Callable[[str], Path],
    table: list[str],
) -> None:
    reference, source = checkpoint(SCHEME), written[to]
    assert open_low_bit(source).format == FORMATS[to]
    folder = source.with_name(f"{to}-converted")
    done = convert(str(source), "compressed-tensors", folder, exact_only=True)
    assert (done.exact, done.lossy) == (len(reference.facts["weights"]), 0)
    assert weight_hashes(source) == weight_hashes(folder) == reference.facts["weights"]
    found = vllm_answers(peer_python("vllm"), folder)
    assert found["packed"] > 0, "vLLM holds no packed weight: it did not read the checkpoint's"
    rows = check_greedy(found["answers"], reference, f"{FORMATS[to]} -> ct, vLLM {found['vllm']}")
    table.append(
        f"{SCHEME:11} {FORMATS[to]} -> ct: {done.exact} linears equal bit for bit; vLLM runs "
        f"{found['packed']} packed on {', '.join(found['kernels'])}"
    )
    table.extend(rows)


def test_the_same_gptq_file_labelled_v2_holds_other_weights(
    written: dict[str, Path], checkpoint: Callable[[str], Checkpoint]
) -> None:
    source = written["gptq"]
    folder = relabelled(source, source.with_name("gptq-labelled-v2"), "gptq_v2")
    found, wanted = weight_hashes(folder), checkpoint(SCHEME).facts["weights"]
    assert found.keys() == wanted.keys()
    assert all(found[name] != wanted[name] for name in wanted)
