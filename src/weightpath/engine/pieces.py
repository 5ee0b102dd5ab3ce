"""Text from tokens as they come: no piece splits a character, or a stop string.

A tokenizer's text of a token depends on those before it (a leading space, the bytes of one
character over several tokens). So the new text of a token is what it adds to the text of the few
tokens before it, and is held back while it ends in the middle of a character.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNDECIDED = "�"
"""What decoding gives for the bytes of a character that is not whole yet."""


class TextPieces:
    """The text of tokens, in pieces that join to `tokenizer.decode` of all of them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._before = 0  # start of the tokens whose text is known, and given
        self._given = 0  # end of them

    def add(self, token: int) -> str:
        """The text that this token finishes: often its own, at times none."""
        self._ids.append(token)
        return self._advance(whole=False)

    def finish(self) -> str:
        """What is held back, as decoding gives it."""
        return self._advance(whole=True)

    def _advance(self, whole: bool) -> str:
        known = self._decode(self._ids[self._before : self._given])
        text = self._decode(self._ids[self._before :])
        if (text.endswith(UNDECIDED) and not whole) or len(text) <= len(known):
            return ""
        self._before, self._given = self._given, len(self._ids)
        del self._ids[: self._before]
        self._given -= self._before
        self._before = 0
        return text[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


class StopStrings:
    """Text up to the first stop string, which is not part of it.

    What could still become one is held back. Of several that end at once the one that starts first
    counts, as it would in the whole text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def add(self, text: str) -> str:
        """Text that is decided now; after `found` is set there is no more."""
        if not self._stops or self.found is not None:
            return "" if self.found is not None else text
        self._held += text
        places = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if places:
            at, self.found = min(places)
            decided, self._held = self._held[:at], ""
            return decided
        keep = max(map(self._beginning, self._stops))
        split = len(self._held) - keep
        decided, self._held = self._held[:split], self._held[split:]
        return decided

    def finish(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, stop: str) -> int:
        """How many of the last characters are the beginning of `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
