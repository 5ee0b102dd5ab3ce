"""Pieces of text: every character whole, stop strings never shown, nothing lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tiny_checkpoint import EOS, TURN, build_tokenizer
from weightpath.engine.pieces import StopStrings, TextPieces


def byte_level() -> Any:
    """One token a byte, so that a character may take several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([""], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def metaspace() -> Any:
    """Words that carry their leading space, and lose it when decoded at the very start."""
    words = {"<unk>": 0, "\n": 1, "▁a": 2, "▁b": 3, "▁": 4, "c": 5, ".": 6}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.mark.parametrize(
    ("made", "ids"),
    [
        (byte_level, "héllo wörld\n  日本語 🙂b 🙂\n\nend."),
        (byte_level, "\n\n"),
        (byte_level, "🙂🙂🙂"),
        (metaspace, [2, 5, 1, 3, 4, 3, 5, 1, 1, 4, 4, 2, 6]),
        (metaspace, [1, 2, 1, 2]),
    ],
    ids=["bytes", "newlines alone", "four bytes a character", "indented words", "newline first"],
)
def test_the_stream_loses_no_character_of_any_kind_of_tokenizer(made: Any, ids: Any) -> None:
    tokenizer = made()
    ids = tokenizer(ids).input_ids if isinstance(ids, str) else ids
    text = TextPieces(tokenizer)
    pieces = [text.add(token) for token in ids]
    assert text.finish() == ""
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("�" in piece for piece in pieces)


def test_special_tokens_are_neither_streamed_nor_in_the_text() -> None:
    tokenizer = build_tokenizer()
    text = TextPieces(tokenizer)
    pieces = [text.add(token) for token in [*tokenizer("hi ").input_ids, TURN, EOS]]
    assert "".join(pieces) + text.finish() == "hi "


def test_each_character_comes_with_the_token_that_finishes_it() -> None:
    tokenizer = byte_level()
    text = TextPieces(tokenizer)
    ids = tokenizer("aé🙂b").input_ids
    assert [text.add(token) for token in ids] == ["a", "", "é", "", "", "", "🙂", "b"]


def test_half_a_character_at_the_end_is_given_as_decoding_gives_it() -> None:
    tokenizer = byte_level()
    ids = tokenizer("a🙂").input_ids[:3]
    text = TextPieces(tokenizer)
    pieces = [text.add(token) for token in ids]
    assert pieces == ["a", "", ""]
    assert "a" + text.finish() == tokenizer.decode(ids)


@given(st.lists(st.integers(0, 255), max_size=40))
def test_any_bytes_join_to_what_decoding_all_of_them_gives(values: list[int]) -> None:
    tokenizer = BYTES
    text = TextPieces(tokenizer)
    joined = "".join(text.add(token) for token in values) + text.finish()
    assert joined == tokenizer.decode(values)


BYTES = byte_level()


@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_ends_before_the_first_stop_string_however_it_is_cut(
    pieces: list[str], stops: list[str]
) -> None:
    """Judged as the text grows: a stop string counts as soon as it is there."""
    whole, wanted, found = "", None, None
    for piece in pieces:
        whole += piece
        places = [(whole.find(stop), stop) for stop in stops if stop in whole]
        if places:
            at, found = min(places)
            wanted = whole[:at]
            break
    cut = StopStrings(stops)
    given_text = ""
    for piece in pieces:
        given_text += cut.add(piece)
        assert not any(stop in given_text for stop in stops)
        if cut.found:
            break
    assert cut.found == found
    assert given_text + cut.finish() == (whole if wanted is None else wanted)


def test_only_what_could_become_a_stop_string_is_held_back() -> None:
    cut = StopStrings(["</end>", "\n\n"])
    shown = [cut.add(piece) for piece in ("one", " </e", "mph>", "\n", "two\n", "\nthree")]
    assert shown == ["one", " ", "</emph>", "", "\ntwo", ""]
    assert cut.found == "\n\n"
    assert cut.add("more") == cut.finish() == ""
