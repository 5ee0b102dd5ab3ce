from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightpath.errors import BadRequest
from weightpath.fidelity.text import (
    BLOCK_CHARACTERS,
    NO_DOCUMENT,
    Document,
    default_documents,
    read_documents,
    windows,
)

DATA = Path(__file__).parents[2].parent / "shared" / "data"

WIKI = "\n".join(
    [
        "",
        " = First = ",
        "",
        " Some words .",
        "",
        " = = Part = = ",
        "",
        " More words .",
        " = not a heading = ",
        " because no blank line is around it .",
        "",
        " = Second ( poem ) = ",
        "",
        " Last words .",
        "",
    ]
)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    return path


def test_wikitext_is_split_at_top_level_headings_only(tmp_path):
    documents, rule = read_documents(write(tmp_path, WIKI))
    assert [d.name for d in documents] == ["First", "Second ( poem )"]
    assert "WikiText" in rule
    assert "not a heading" in documents[0].text


def test_source_files_are_split_at_their_file_lines(tmp_path):
    text = "# file: a/b.py\nx = 1\n\n# a comment\n# file: c.py\ny = 2\n"
    documents, rule = read_documents(write(tmp_path, text))
    assert [d.name for d in documents] == ["a/b.py", "c.py"]
    assert "# file:" in rule


def test_text_before_the_first_heading_is_a_document_of_its_own(tmp_path):
    documents, _ = read_documents(write(tmp_path, "preface\n# file: a\n1\n# file: b\n2\n"))
    assert [d.name for d in documents] == ["(beginning)", "a", "b"]


def test_plain_text_becomes_blocks_of_at_least_the_stated_size(tmp_path):
    text = "".join(f"{'word ' * 100}{i}\n\n" for i in range(30))
    documents, rule = read_documents(write(tmp_path, text))
    assert len(documents) > 3
    assert all(len(d.text) >= BLOCK_CHARACTERS for d in documents)
    assert "blank lines" in rule


@given(
    st.lists(
        st.sampled_from(
            [" = Title = \n", "# file: x.py\n", "words\n", "\n", " \n", "w" * 900 + "\n"]
        ),
        min_size=1,
        max_size=40,
    )
)
def test_the_documents_joined_are_the_file(tmp_path_factory, lines):
    text = "".join(lines)
    path = write(tmp_path_factory.mktemp("text"), text)
    if not text.strip():
        with pytest.raises(BadRequest, match="blank"):
            read_documents(path)
    else:
        assert "".join(d.text for d in read_documents(path)[0]) == text


def test_bad_files_are_named_with_the_mend(tmp_path):
    with pytest.raises(BadRequest, match=r"absent\.txt.*readable"):
        read_documents(tmp_path / "absent.txt")
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"abc\xff")
    with pytest.raises(BadRequest, match="byte 3 is not UTF-8"):
        read_documents(bad)


@pytest.mark.parametrize(
    ("name", "least", "most"), [("wikitext2-test.txt", 55, 64), ("code-test.txt", 67, 67)]
)
def test_shared_texts_split_into_their_articles_and_files(name, least, most):
    if not (DATA / name).exists():
        pytest.skip(f"{DATA / name} is absent")
    documents, _ = read_documents(DATA / name)
    assert least <= len(documents) <= most
    assert all(d.name and d.text.strip() for d in documents)


def test_the_default_text_is_long_shuffled_and_the_same_every_time():
    documents, description = default_documents()
    again, _ = default_documents()
    assert documents == again
    assert len(documents) >= 60
    assert sum(len(d.text) for d in documents) > 300_000
    assert [d.name for d in documents] != sorted(d.name for d in documents)
    assert "Python 3." in description


def test_windows_stay_within_a_document_and_keep_long_enough_ends(tokenizer):
    documents = [Document("a", "a" * 250), Document("b", "b" * 130), Document("c", "c" * 63)]
    found = windows(tokenizer, documents, length=100)
    assert [(len(w.tokens), w.document) for w in found] == [(100, 0), (100, 0), (100, 1)]
    found = windows(tokenizer, documents, length=100, minimum=30)
    assert [(len(w.tokens), w.document) for w in found] == [
        (100, 0), (100, 0), (50, 0), (100, 1), (30, 1), (63, 2),
    ]  # fmt: skip
    for window in found:
        assert len(set(window.tokens.tolist())) == 1
        assert window.tokens.dtype == torch.int64


def test_a_limit_takes_one_window_of_every_document_before_two_of_any(tokenizer):
    documents = [Document(str(i), "x" * 1000) for i in range(10)]
    twelve = windows(tokenizer, documents, length=100, limit=12)
    counts = [sum(w.document == i for w in twelve) for i in range(10)]
    assert sum(counts) == 12
    assert set(counts) == {1, 2}
    assert [w.document for w in twelve] == sorted(w.document for w in twelve)
    four = windows(tokenizer, documents, length=100, limit=4)
    assert len({w.document for w in four}) == 4
    assert {w.document for w in four} != {0, 1, 2, 3}


def test_contiguous_windows_are_the_text_in_a_row(tokenizer):
    documents = [Document("a", "abc" * 50), Document("b", "def" * 50)]
    found = windows(tokenizer, documents, length=64, contiguous=True)
    assert [len(w.tokens) for w in found] == [64] * 4
    assert {w.document for w in found} == {NO_DOCUMENT}
    joined = torch.cat([w.tokens for w in found]).tolist()
    assert joined == tokenizer("abc" * 50 + "def" * 50)["input_ids"][:256]


def test_bos_begins_every_window_and_counts_in_its_length(tokenizer, bos_tokenizer):
    documents = [Document("a", "a" * 250)]
    for contiguous in (False, True):
        found = windows(bos_tokenizer, documents, length=100, contiguous=contiguous)
        assert all(len(w.tokens) <= 100 for w in found)
        assert all(w.tokens[0] == 0 and w.tokens[1] != 0 for w in found)
        assert all(0 not in w.tokens for w in windows(tokenizer, documents, length=100))


def test_text_too_short_for_a_window_is_refused_with_the_numbers(tokenizer):
    with pytest.raises(BadRequest, match="1 documents give no window of 64 tokens"):
        windows(tokenizer, [Document("a", "short")])
    with pytest.raises(BadRequest, match="nothing to predict"):
        windows(tokenizer, [Document("a", "long " * 100)], length=1)
