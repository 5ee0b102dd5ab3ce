"""Sessions kept between requests, so that a chat's next turn finds its beginning in a cache."""

from __future__ import annotations

from collections.abc import Sequence

from weightpath.engine.session import Engine, Session, common_prefix


class Sessions:
    """At most `most` sessions on an engine, `taken` ones included. Not for several threads."""

    def __init__(self, engine: Engine, most: int, context: int | None = None) -> None:
        self._engine, self._most, self._context = engine, most, context
        first = engine.open_session(context)
        self.context = first.context
        self._idle: list[Session] = [first]  # the longest unused first
        self._count = 1

    def take(self, prompt: Sequence[int]) -> Session:
        """The idle session that shares the longest beginning with the prompt.

        One that shares less than half of what it holds belongs to another chat: a session with
        nothing in it, or a new one, is taken instead; with no room for one, the longest unused.
        """
        shared = [(common_prefix(one.tokens, prompt), one) for one in self._idle]
        best = max(shared, key=lambda pair: pair[0], default=None)
        if best is not None and best[0] > 0 and 2 * best[0] >= len(best[1].tokens):
            chosen = best[1]
        else:
            chosen = next((one for one in self._idle if not one.tokens), None)
            if chosen is None and self._count < self._most:
                self._count += 1
                return self._engine.open_session(self._context)
            chosen = chosen or self._idle[0]
        self._idle = [one for one in self._idle if one is not chosen]
        return chosen

    def give_back(self, session: Session) -> None:
        """A session whose request is done."""
        self._idle.append(session)

    def drop(self) -> None:
        """A taken session is no longer to be trusted; another may be opened in its place."""
        self._count -= 1
