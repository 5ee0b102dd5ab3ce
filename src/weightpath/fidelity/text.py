"""The text that fidelity is measured on: a file or a shipped default, cut into windows of tokens.

    file -> documents -> windows of at most `length` tokens

Documents matter because tokens of one document are not independent: intervals are bootstrapped
over documents (see metrics.py). Windows therefore never cross a document, unless `contiguous`
asks for the cut that published figures use: the whole text in a row, where the window itself
stands in for the document.
"""

from __future__ import annotations

import platform
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightpath.errors import BadRequest

BLOCK_CHARACTERS = 2000
"""Smallest document, in characters, where only blank lines tell documents apart."""

NO_DOCUMENT = -1
"""`Window.document` of a window cut from the whole text."""

_WIKI_HEADING = re.compile(r" = (?!= ).+ = ?")
_FILE_HEADING = re.compile(r"# file: \S.*")


@dataclass(frozen=True)
class Document:
    """One document: a name for messages, and its text."""

    name: str
    text: str


@dataclass(frozen=True)
class Window:
    """Tokens int64 [L] read by a model in one pass, and the index of the document they are from.

    `document` is NO_DOCUMENT for a window of a contiguous cut, which may span several.
    """

    tokens: Tensor
    document: int


def read_documents(path: str | Path) -> tuple[list[Document], str]:
    """Split a UTF-8 text file into documents, and say by which rule.

    Rules, the first that finds two or more documents: top-level headings of WikiText
    (` = Title = ` between blank lines); `# file: NAME` lines; blank-line-separated blocks, joined
    until a document holds BLOCK_CHARACTERS. The texts joined together are the file, whichever
    rule applied. BadRequest where the file is absent, not UTF-8, or blank.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as problem:
        raise BadRequest(f"text file {path}: {problem.strerror}; give a readable file") from None
    except UnicodeDecodeError as problem:
        raise BadRequest(
            f"text file {path}: byte {problem.start} is not UTF-8; convert the file to UTF-8"
        ) from None
    if not text.strip():
        raise BadRequest(f"text file {path}: {len(text)} characters, all blank; give some text")
    lines = text.splitlines(keepends=True)
    for is_heading, rule in (
        (_is_wiki_heading, "WikiText top-level headings"),
        (_is_file_heading, "'# file:' lines"),
    ):
        starts = [i for i in range(len(lines)) if is_heading(lines, i)]
        if len(starts) >= 2:
            return _cut(lines, starts), f"{path.name}: {len(starts)} documents by {rule}"
    documents = _blocks(lines)
    rule = f"blank lines, at least {BLOCK_CHARACTERS} characters each"
    return documents, f"{path.name}: {len(documents)} documents by {rule}"


def default_documents() -> tuple[list[Document], str]:
    """English prose that every Python carries: the language reference in `pydoc_data.topics`.

    Needs no network (PSF licence). Topics in sorted order, then shuffled with seed 0, so that the
    first few are not all from the start of the alphabet. The text differs between versions of
    Python, so the description names the version.
    """
    from pydoc_data.topics import topics

    names = sorted(topics)
    random.Random(0).shuffle(names)
    documents = [Document(name, topics[name]) for name in names]
    version = ".".join(platform.python_version_tuple()[:2])
    return documents, f"Python {version} language reference, {len(documents)} topics (pydoc_data)"


def windows(
    tokenizer: Any,
    documents: Iterable[Document],
    length: int = 512,
    limit: int | None = None,
    *,
    contiguous: bool = False,
    minimum: int = 64,
) -> list[Window]:
    """Cut documents into windows of at most `length` tokens, at most `limit` of them.

    Within documents: a document's last window is kept where it has `minimum` tokens, so short
    documents count too; with a limit, every document gives one window before any gives two, in a
    fixed shuffled order, so that few windows still mean many documents. Contiguous: the texts
    joined, cut from the start, a last window shorter than `length` left out.

    What the tokenizer puts before a text (BOS, for those that do) begins every window and counts
    in its length. BadRequest where no window comes out.
    """
    prefix = _prefix(tokenizer)
    if length <= len(prefix) + 1 or minimum < 2:
        raise BadRequest(
            f"windows of {length} tokens, at least {minimum}: nothing to predict; "
            f"use a length above {len(prefix) + 1} and a minimum of at least 2"
        )
    documents = list(documents)
    if contiguous:
        whole = "".join(document.text for document in documents)
        cut = _pieces(_tokens(tokenizer, whole), length - len(prefix), length - len(prefix))
        chosen = [(NO_DOCUMENT, piece) for piece in cut[:limit]]
    else:
        chosen = _in_turn(
            documents,
            lambda document: _pieces(
                _tokens(tokenizer, document.text), length - len(prefix), minimum - len(prefix)
            ),
            limit,
        )
    if not chosen:
        raise BadRequest(
            f"text: {len(documents)} documents give no window of "
            f"{length if contiguous else minimum} tokens or more; give a longer text"
        )
    return [Window(torch.tensor(prefix + piece), document) for document, piece in chosen]


def _is_wiki_heading(lines: list[str], i: int) -> bool:
    def blank(j: int) -> bool:
        return not 0 <= j < len(lines) or not lines[j].strip()

    return bool(_WIKI_HEADING.fullmatch(lines[i].rstrip("\n"))) and blank(i - 1) and blank(i + 1)


def _is_file_heading(lines: list[str], i: int) -> bool:
    return bool(_FILE_HEADING.fullmatch(lines[i].rstrip("\n")))


def _cut(lines: list[str], starts: list[int]) -> list[Document]:
    """Documents that begin at each heading; lines before the first one stay with it if blank."""
    documents = []
    if "".join(lines[: starts[0]]).strip():
        documents.append(Document("(beginning)", "".join(lines[: starts[0]])))
        begin = starts[0]
    else:
        begin = 0
    for heading, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
        name = lines[heading].strip(" =\n").removeprefix("# file: ")
        documents.append(Document(name, "".join(lines[begin:stop])))
        begin = stop
    return documents


def _blocks(lines: list[str]) -> list[Document]:
    """Blocks between blank lines, joined until each document has BLOCK_CHARACTERS."""
    texts: list[str] = []
    held: list[str] = []
    size = 0
    for line in lines:
        held.append(line)
        size += len(line)
        if not line.strip() and size >= BLOCK_CHARACTERS:
            texts.append("".join(held))
            held, size = [], 0
    rest = "".join(held)
    if texts and len(rest) < BLOCK_CHARACTERS:
        texts[-1] += rest
    elif rest:
        texts.append(rest)
    return [Document(f"block {i + 1}", text) for i, text in enumerate(texts)]


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _prefix(tokenizer: Any) -> list[int]:
    """What the tokenizer adds before a text, such as [BOS]; empty for those that add nothing."""
    plain = _tokens(tokenizer, "a")
    full = tokenizer("a")["input_ids"]
    for i in range(len(full) - len(plain) + 1):
        if full[i : i + len(plain)] == plain:
            return list(full[:i])
    raise BadRequest(
        f"tokenizer {type(tokenizer).__name__}: 'a' is {plain} alone and {full} with special "
        "tokens, which does not contain it; use the tokenizer that belongs to the model"
    )


def _pieces(tokens: list[int], size: int, minimum: int) -> list[list[int]]:
    pieces = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    return [piece for piece in pieces if len(piece) >= max(minimum, 1)]


def _in_turn(
    documents: list[Document],
    cut: Callable[[Document], list[list[int]]],
    limit: int | None,
) -> list[tuple[int, list[int]]]:
    """Pieces in text order; with a limit, documents give one each in turn, in shuffled order.

    Documents are cut only until `limit` of them gave a piece, so a large file costs no more.
    """
    if limit is None:
        return [(i, piece) for i, document in enumerate(documents) for piece in cut(document)]
    order = list(range(len(documents)))
    shuffle = random.Random(0).shuffle
    shuffle(order)
    queues: dict[int, list[tuple[int, list[int]]]] = {}
    for i in order:
        if len(queues) == limit:
            break
        if pieces := list(enumerate(cut(documents[i]))):
            shuffle(pieces)
            queues[i] = pieces
    taken: list[tuple[int, int, list[int]]] = []
    while len(taken) < limit and any(queues.values()):
        for i, pieces in queues.items():
            if pieces and len(taken) < limit:
                place, piece = pieces.pop()
                taken.append((i, place, piece))
    return [(i, piece) for i, place, piece in sorted(taken, key=lambda item: item[:2])]
