"""The error family: one line, the name first, the mend last, exit code 2."""

from __future__ import annotations

import pytest

from weightpath import errors


@pytest.mark.parametrize(
    "error",
    [
        errors.BadTensor("model.norm.weight", "has 3 elements, wanted 4", "fetch it again"),
        errors.BadCheckpoint("model", "has no config.json", "give a complete folder"),
        errors.BadRequest("bits: 9; use 2 to 8"),
        errors.CannotRun("triton: no CUDA here"),
    ],
)
def test_every_error_is_of_the_family_and_exits_with_2(error: errors.WeightpathError) -> None:
    assert isinstance(error, errors.WeightpathError)
    assert error.exit_code == 2
    assert "\n" not in str(error)


def test_a_bad_tensor_names_itself_then_the_numbers_then_the_mend() -> None:
    error = errors.BadTensor("a.weight", "has 3 rows, wanted 4", "fetch it again")
    assert str(error) == "tensor a.weight: has 3 rows, wanted 4; fetch it again"
    assert (error.name, error.problem, error.mend) == (
        "a.weight",
        "has 3 rows, wanted 4",
        "fetch it again",
    )


def test_a_bad_checkpoint_names_the_place() -> None:
    error = errors.BadCheckpoint("folder", "is empty", "give another")
    assert str(error) == "folder: is empty; give another"
    assert error.where == "folder"


@pytest.mark.parametrize("name", ["two\nlines", "\x1b[2J", "nul\0", "half\ud800", "x" * 200_000])
def test_what_a_file_calls_itself_cannot_spoil_a_message(name: str) -> None:
    said = str(errors.BadTensor(name, "has 3 rows, wanted 4", "fetch it again"))
    assert said.isprintable()
    assert len(said) <= errors.LONGEST
    assert said.endswith("has 3 rows, wanted 4; fetch it again")
