"""Ctrl-C ends the command at once, and not by an exception that travels through other libraries.

A KeyboardInterrupt can arise anywhere between two bytecodes. Within torch's reading of arguments it
is lost or becomes another error, and one that leaves a thread of torch behind aborts the process at
the interpreter's end: 3 of 54 interrupted runs on a busy machine (docs/experiments.md, Ctrl-C). What
was finished is in the journal, as after kill -9, so nothing has to be cleared up but the terminal.
"""

from __future__ import annotations

import os
import signal
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

CODE = 130
"""What shells give for a command that Ctrl-C ended."""
MESSAGE = "interrupted; what was finished is kept, run the same command to go on"
_SHOW_CURSOR = "\x1b[?25h"


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """While this lasts, Ctrl-C prints MESSAGE and ends the process with CODE.

    Does nothing in a thread other than the main one, which may set no handler.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    terminal = _terminal()

    def leave(*_: object) -> NoReturn:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if terminal is not None:
            with suppress(termios.error):
                termios.tcsetattr(0, termios.TCSANOW, terminal)
        text = f"weightpath: {MESSAGE}\n"
        if os.isatty(2):
            text = f"\n{_SHOW_CURSOR}{text}"
        with suppress(OSError):
            os.write(2, text.encode())
        os._exit(CODE)

    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """While this lasts, the first Ctrl-C only makes the yielded function true, so that what is
    running can end by itself; a second one does what it did before.

    Changes nothing in a thread other than the main one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    pressed = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def note(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        pressed.set()

    signal.signal(signal.SIGINT, note)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _terminal() -> list[Any] | None:
    """The settings of the terminal that is read from, which input() changes while it waits."""
    try:
        return termios.tcgetattr(0) if os.isatty(0) else None
    except termios.error:
        return None
