"""Findings told in few lines, whatever the names in a file hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightpath.checkpoints.audit import SEVERITIES, Finding, finding_of, summarise
from weightpath.errors import BadCheckpoint, BadTensor


def many(count: int, severity: str = "warning", kind: str = "zero scales") -> list[Finding]:
    return [
        Finding(severity, f"model.layers.{i}.mlp.up_proj", f"{kind}: {i + 1} of 64, first [0, {i}]",
                "quantize it again", kind, "linear")
        for i in range(count)
    ]  # type: ignore[arg-type]  # fmt: skip


def test_alike_findings_become_one_line_with_their_number_and_the_first_of_them() -> None:
    (line,) = summarise(many(32), linears=210)
    assert line == (
        "warning: zero scales in 32 of 210 linears, first model.layers.0.mlp.up_proj: "
        "zero scales: 1 of 64, first [0, 0]; quantize it again"
    )


def test_one_finding_is_told_as_it_is() -> None:
    assert summarise(many(1), linears=210) == (many(1)[0].line,)
    assert summarise(()) == ()


def test_worst_comes_first_and_severities_are_not_mixed() -> None:
    lines = summarise([*many(3, "note"), *many(2, "warning"), *many(2, "error", "NaN scales")])
    assert [line.split(":")[0] for line in lines] == ["error", "warning", "note"]
    assert "in 3 linears" in lines[2]


def test_findings_without_a_kind_are_alike_when_only_their_numbers_differ() -> None:
    findings = [Finding("note", f"t{i}", f"has {i}.5 of 9", "none") for i in range(4)]
    assert len(summarise(findings)) == 1
    assert len(summarise([*findings, Finding("note", "t", "lacks 1 of 9", "none")])) == 2


def test_what_goes_beyond_the_limit_is_counted_in_the_last_line() -> None:
    findings = [many(1, "warning", f"kind {chr(97 + i)}")[0] for i in range(6)]
    lines = summarise([*findings, *many(1, "note", "z")], limit=3)
    assert len(lines) == 3
    assert lines[-1] == "and 5 more kinds of finding (4 warnings, 1 note)"


@given(st.text(), st.text(), st.sampled_from(SEVERITIES))
def test_no_name_from_a_file_breaks_a_line_or_makes_it_long(
    name: str, problem: str, severity: str
) -> None:
    finding = Finding(severity, name * 50, problem * 50, "mend")  # type: ignore[arg-type]
    for line in (finding.line, *summarise([finding, finding])):
        assert line.isprintable()
        assert len(line) < 1000


def test_what_a_reader_refused_becomes_an_error_with_the_same_words() -> None:
    error = BadTensor("a.scales", "scale [0, 1] is nan", "fetch it again")
    assert finding_of(error).line == "error: a.scales: scale [0, 1] is nan; fetch it again"
    assert finding_of(BadCheckpoint("folder", "is empty", "fill it")).tensor == "folder"


@pytest.mark.parametrize("limit", [1, 2])
def test_a_small_limit_still_tells_how_much_was_left_out(limit: int) -> None:
    lines = summarise([*many(2, "error", "a"), *many(2, "note", "b"), *many(2, "note", "c")], limit)
    assert len(lines) == limit
    assert f"and {4 - limit} more kinds" in lines[-1]
