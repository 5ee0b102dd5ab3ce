from __future__ import annotations

import copy
from html.parser import HTMLParser

import pytest

from weightpath.errors import BadRequest
from weightpath.report.html import render, write_report

VOID = {"meta", "br", "hr", "img", "link", "input"}
SECTIONS = {
    "device": "Device",
    "plan": "Plan",
    "written": "What was written",
    "fidelity": "Fidelity",
    "speed": "Speed",
    "answer": "An answer from these weights",
}


class Page(HTMLParser):
    """Checks that elements nest, and collects headings, text and outside references."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.headings: list[str] = []
        self.elements: list[str] = []
        self.text: list[str] = []
        self.outside: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        for key, value in attrs:
            if key == "src" or (key.endswith("href") and not (value or "").startswith("#")):
                self.outside.append(f"{tag} {key}={value}")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
        if "style" not in self.open:
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def test_a_full_report_holds_every_section_and_needs_nothing_outside(data):
    page = Page(render(data))
    assert page.headings == [*SECTIONS.values(), "How to run it"]
    assert page.elements.count("svg") == 2
    assert page.outside == []
    assert "script" not in page.elements
    assert "link" not in page.elements


@pytest.mark.parametrize("missing", SECTIONS)
def test_a_section_without_data_is_left_out_and_the_others_stay(data, missing):
    del data[missing]
    headings = Page(render(data)).headings
    assert headings == [
        title for key, title in [*SECTIONS.items(), ("written", "How to run it")] if key != missing
    ]


def test_a_report_of_nothing_is_still_a_page():
    page = Page(render({}))
    assert page.headings == []
    assert "weightpath report" in page.words


def test_fidelity_stands_without_its_noise_floor_or_its_greedy_texts(data):
    data["fidelity"] |= {"noise_floor": None, "greedy": None}
    words = Page(render(data)).words
    assert "mean KL divergence" in words
    assert "Noise floor:" not in words
    assert "Greedy texts" not in words
    data["fidelity"] = {"greedy": {**_greedy(data), "k": 1}}
    page = Page(render(data))
    assert "Greedy texts: 1 of 2" in page.words
    assert "svg" not in page.elements


def _greedy(data):
    return {
        "k": 1, "n": 2, "max_new_tokens": 4, "method": "generate",
        "equal": {"value": 0.5, "low": 0.1, "high": 0.9},
        "equal_reference": {"value": 1.0, "low": 0.3, "high": 1.0},
        "prompts": [],
    }  # fmt: skip


def test_the_numbers_shown_are_those_given(data):
    words = Page(render(data)).words
    assert "98,765,432 (98.8 MB)" in words
    assert "4.250" in words
    assert "5.123" in words
    assert "210 w4g64, 1 int8" in words
    mean = data["fidelity"]["summary"]["mean_kl"]
    assert f"mean KL divergence, nats {mean['value']:#.3g}" in words
    assert f"{mean['low']:#.3g} to {mean['high']:#.3g}" in words
    assert "differs after 2 of 4 tokens" in words
    assert "w4a8-there no such unit" in words
    assert "Some Processor · x86_64 /proc/cpuinfo" in words
    assert "Acme NPU: no runtime" in words


def test_a_ratio_within_the_spread_is_not_ranked(data):
    words = Page(render(data)).words
    assert "2.20× (1.90 to 2.50)" in words
    assert "0.97× (0.90 to 1.05), within the spread" in words


def _spoil(value, mark):
    """Every string in data with markup appended, keys of by_scheme included."""
    if isinstance(value, str):
        return value + mark
    if isinstance(value, dict):
        return {
            (k + mark if k in ("w4g64", "int8") else k): _spoil(v, mark) for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [_spoil(v, mark) for v in value]
    return value


def test_markup_in_any_string_is_shown_as_text(data):
    mark = "<script>alert('x')</script>\"&<b>"
    plain = Page(render(data))
    spoiled = Page(render(_spoil(copy.deepcopy(data), mark)))
    added = [e for e in set(spoiled.elements) if e not in plain.elements]
    assert added == []
    assert mark in spoiled.words
    assert spoiled.words.count(mark) > 20


def test_the_file_is_written_whole_and_not_over_another_unless_asked(data, tmp_path):
    path = tmp_path / "report.html"
    assert write_report(path, data) == path
    assert path.read_text(encoding="utf-8") == render(data)
    with pytest.raises(BadRequest, match=r"report\.html: the file exists"):
        write_report(path, {})
    write_report(path, {}, overwrite=True)
    assert path.read_text(encoding="utf-8") == render({})
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(BadRequest, match="does not exist"):
        write_report(tmp_path / "absent" / "report.html", data)
