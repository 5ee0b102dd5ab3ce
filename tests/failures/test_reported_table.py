"""README.md's table is whole: every report has tests that exist and name it, and none is left out."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TESTS = HERE.parent
OWN = "failures/"


def reports(text: str) -> list[str]:
    """Reports in a cell; "vllm#15429, #33972" are two of one project."""
    found, project = [], ""
    for named, number in re.findall(r"([\w.-]*)#(\d+)", text):
        project = named or project
        found.append(f"{project}#{number}")
    return found


def rows() -> list[tuple[list[str], list[str]]]:
    """(reports, tests) of every row."""
    cells = [line.strip("|").split("|") for line in (HERE / "README.md").read_text().splitlines()
             if line.startswith("| ") and "#" in line]  # fmt: skip
    return [(reports(row[0]), [name.strip() for name in row[-1].split(",")]) for row in cells]


@cache
def functions_of(file: str) -> dict[str, str]:
    """Test functions of a file below tests/, with their docstrings."""
    tree = ast.parse((TESTS / file).read_text())
    return {
        node.name: ast.get_docstring(node) or ""
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def docstring(test: str) -> str | None:
    file, _, name = test.partition("::")
    return functions_of(file).get(name) if (TESTS / file).is_file() else None


ROWS = rows()


@pytest.mark.parametrize(("found", "tests"), ROWS, ids=[row[0][0] for row in ROWS])
def test_every_report_has_tests_that_exist_and_name_it(found: list[str], tests: list[str]) -> None:
    assert tests
    texts = {test: docstring(test) for test in tests}
    assert [test for test, text in texts.items() if text is None] == []
    own = {test: reports(text or "") for test, text in texts.items() if test.startswith(OWN)}
    assert [test for test, named in own.items() if not set(named) & set(found)] == []
    if own:
        assert set(found) <= {report for named in own.values() for report in named}


def test_every_test_of_this_folder_is_in_the_table() -> None:
    listed = {test for _, tests in ROWS for test in tests}
    here = {
        f"{OWN}{file.name}::{name}"
        for file in HERE.glob("test_*.py")
        if file.name != Path(__file__).name
        for name in functions_of(f"{OWN}{file.name}")
    }
    assert here - listed == set()
    assert len(here) > 30


def test_no_report_is_in_two_rows() -> None:
    every = [report for found, _ in ROWS for report in found]
    assert len(every) == len(set(every)) > 30


def test_the_table_is_that_of_the_reference(shared: Path) -> None:
    text = (shared / "reference" / "formats.md").read_text()
    table = text.split("# Failures that users reported")[1].split("\n# ")[0]
    wanted = [reports(line.split("|")[2]) for line in table.splitlines() if "#" in line]
    assert [found for found, _ in ROWS] == [row for row in wanted if row]
