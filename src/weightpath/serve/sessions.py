"""Sessions kept between requests, so that a chat's next turn finds its beginning in a cache."""

from __future__ import annotations

from collections.abc import Sequence

from weightpath.engine.session import Engine, Session, common_prefix

SEAM = 4
"""Tokens at a prompt's end that may be cut otherwise once a reply follows."""


class Sessions:
    """At most `most` sessions on an engine, those in use included. Not for several threads."""

    def __init__(self, engine: Engine, most: int, context: int | None = None) -> None:
        self._engine, self._most, self._context = engine, most, context
        first = engine.session(context)
        self.context = first.context
        self._idle: list[tuple[Session, int]] = [(first, 0)]  # the longest unused first
        self._count = 1

    def take(self, prompt: Sequence[int]) -> Session:
        """The idle session whose last prompt this one goes on from, the longest such.

        Else one that holds nothing, else a new one, else the longest unused: a chat that may still
        go on is given up last.
        """
        chosen, longest = -1, 0
        for index, (session, asked) in enumerate(self._idle):
            shared = common_prefix(session.tokens, prompt)
            if shared > longest and shared >= asked - SEAM:
                chosen, longest = index, shared
        if chosen < 0:
            empty = (i for i, (session, _) in enumerate(self._idle) if not session.tokens)
            chosen = next(empty, -1)
        if chosen < 0 and self._count < self._most:
            opened = self._engine.session(self._context)
            self._count += 1
            return opened
        return self._idle.pop(max(chosen, 0))[0]

    def give_back(self, session: Session, prompt: Sequence[int]) -> None:
        """A session whose request, with this prompt, is done."""
        self._idle.append((session, min(len(prompt), len(session.tokens))))

    def drop(self) -> None:
        """A session in use is no longer to be trusted; another may be opened in its place."""
        self._count -= 1
