"""The advice of inspect is true: each conversion that it names is run, and its result examined.

A runtime that did not load the file loads what was written, in every release of its row; "exact"
is told only where the conversion reports every linear exact, "lossy" only where one is not; and
where no conversion is said to help, none of them does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_formats import FORMATS, Written, write
from weightpath.errors import BadRequest
from weightpath.jobs.convert import Converted, convert
from weightpath.jobs.examine import Examination, examine
from weightpath.paths.converted import TARGETS
from weightpath.paths.held import Verdict
from weightpath.paths.vllm_accepts import FIRST_OF_SPAN, span_label

pytestmark = pytest.mark.usefixtures("one_thread")

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gptq, asymmetric": ("gptq-v1", {"symmetric": False}),
    "gptq, 3 bits, asymmetric": ("gptq-v1", {"bits": 3, "symmetric": False}),
    "gptq, ordered": ("gptq-v1", {"ordered": True}),
    "gptq, desc_act with static groups": ("gptq-v1", {"static_groups": True}),
    "gptq, intermediate 144": (
        "gptq-v2", {"group_size": 16, "symmetric": False, "model": {"intermediate_size": 144}}
    ),
    "ct, 6 bits, asymmetric": ("ct-packed", {"bits": 6, "symmetric": False}),
    "gguf, Q6_K": ("gguf", {"kind": "Q6_K"}),
}  # fmt: skip
CASES = {name: (name, {}) for name in FORMATS} | VARIANTS
SPANS = {
    span_label(FIRST_OF_SPAN[i], (*FIRST_OF_SPAN, None)[j]): set(FIRST_OF_SPAN[i:j])
    for i in range(len(FIRST_OF_SPAN))
    for j in range(i + 1, len(FIRST_OF_SPAN) + 1)
}
"""What a vLLM row's versions stand for."""
Convert = Callable[[str], tuple[Converted, Examination]]


def releases(verdict: Verdict) -> set[int]:
    return SPANS[verdict.versions] if verdict.runtime == "vLLM" else {0}


def rows_of(found: Examination, like: Verdict) -> list[Verdict]:
    """The rows of the same runtime and device for the releases of a row."""
    rows = [
        row
        for row in found.acceptance
        if (row.runtime, row.device) == (like.runtime, like.device)
        and releases(row) & releases(like)
    ]
    assert set().union(*(releases(row) for row in rows)) >= releases(like)
    return rows


def conversions(source: Written, folder: Path) -> Convert:
    """run(target): what `convert` says, and its result examined; each target once."""

    @cache
    def run(to: str) -> tuple[Converted, Examination]:
        done = convert(str(source.path), to, folder / to)
        return done, examine(done.folder)

    return run


@pytest.mark.parametrize("case", CASES)
def test_what_is_advised_loads_in_the_same_runtime_and_keeps_what_is_promised(
    case: str, tmp_path: Path
) -> None:
    kind, options = CASES[case]
    source = write(kind, tmp_path / "in", tokenizer=True, **options)
    run = conversions(source, tmp_path)
    found = examine(source.path)
    assert found.errors == ()
    advised = [verdict for verdict in found.acceptance if verdict.convert is not None]
    assert all(verdict.loads != "yes" for verdict in advised)
    for verdict in advised:
        assert verdict.convert is not None
        done, after = run(verdict.convert.removeprefix("--to "))
        assert after.errors == ()
        assert {row.loads for row in rows_of(after, verdict)} == {"yes"}, verdict
        if verdict.lossless is True:
            assert done.lossy == 0, verdict
        if verdict.lossless is False:
            assert done.lossy > 0, verdict


@pytest.mark.parametrize("case", ["weightpath-int8", "ct-int8"])
def test_where_no_conversion_is_said_to_help_none_does(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    source = write(kind, tmp_path / "in", tokenizer=True, **options)
    run = conversions(source, tmp_path)
    hopeless = [
        verdict
        for verdict in examine(source.path).acceptance
        if verdict.loads != "yes" and verdict.convert is None
    ]
    assert hopeless
    for verdict in hopeless:
        assert "no convert helps: " in verdict.why
        for to in TARGETS:
            try:
                _, after = run(to)
            except BadRequest as refusal:
                assert "nothing is left to write" in str(refusal)  # noqa: PT017
                continue
            assert {row.loads for row in rows_of(after, verdict)} != {"yes"}, (to, verdict)


def test_nothing_is_advised_where_nothing_needs_it(tmp_path: Path) -> None:
    source = write("ct-packed", tmp_path / "in", scale_dtype=torch.bfloat16)
    found = examine(source.path)
    assert [row.runtime for row in found.acceptance if row.loads != "yes"] == ["llama.cpp"]
