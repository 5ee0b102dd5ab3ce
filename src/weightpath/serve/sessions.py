"""Sessions kept between requests, so that what a prompt begins with is found in a cache.

A chat's next turn goes on in its own session. Where another session holds more of the prompt's
beginning (a second chat under the same system message, a chat that is forked) that much of its
cache is copied, which costs a copy of memory instead of a run.
"""

from __future__ import annotations

from collections.abc import Sequence

from weightpath.engine.session import Engine, Session, common_prefix

SEAM = 4
"""Tokens at a prompt's end that may be cut otherwise once a reply follows."""
WORTH = 16
"""Tokens that another session must hold beyond the chosen one: a block of its cache is copied in
about the time that a few tokens take to run."""


class Sessions:
    """At most `most` sessions on an engine, those in use included. Not for several threads: a
    session in use may be copied from, between its steps."""

    def __init__(self, engine: Engine, most: int, context: int | None = None) -> None:
        self._engine, self._most, self._context = engine, most, context
        first = engine.session(context)
        self.context = first.context
        self._idle: list[tuple[Session, int]] = [(first, 0)]  # the longest unused first
        self._used: list[Session] = []

    def take(self, prompt: Sequence[int]) -> Session:
        """The idle session whose last prompt this one goes on from, the longest such.

        Else one that holds nothing, else a new one, else the longest unused: a chat that may still
        go on is given up last. It holds what any session holds of the prompt's beginning.
        """
        chosen, longest = -1, 0
        for index, (session, asked) in enumerate(self._idle):
            shared = common_prefix(session.tokens, prompt)
            if shared > longest and shared >= asked - SEAM:
                chosen, longest = index, shared
        if chosen < 0:
            empty = (i for i, (session, _) in enumerate(self._idle) if not session.tokens)
            chosen = next(empty, -1)
        if chosen < 0 and len(self._idle) + len(self._used) < self._most:
            taken = self._engine.session(self._context)
        else:
            taken = self._idle.pop(max(chosen, 0))[0]
        self._share(taken, prompt)
        self._used.append(taken)
        return taken

    def _share(self, taken: Session, prompt: Sequence[int]) -> None:
        """Copy the prompt's beginning from the session that holds most of it."""
        best, longest = taken, common_prefix(taken.tokens, prompt) + WORTH - 1
        for other in (*(session for session, _ in self._idle), *self._used):
            shared = common_prefix(other.tokens, prompt)
            if shared > longest:
                best, longest = other, shared
        if best is not taken:
            taken.adopt(best, longest)  # where it cannot, the prompt is run

    def give_back(self, session: Session, prompt: Sequence[int]) -> None:
        """A session whose request, with this prompt, is done."""
        self._forget(session)
        self._idle.append((session, min(len(prompt), len(session.tokens))))

    def drop(self, session: Session) -> None:
        """A session in use is no longer to be trusted; another may be opened in its place."""
        self._forget(session)

    def _forget(self, session: Session) -> None:
        self._used = [one for one in self._used if one is not session]
