"""Ctrl-C ends a command at once, whatever library it is in, and leaves the terminal as it was."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path

from weightpath.cli.interrupt import MESSAGE, leaving_at_once, stopping

SWALLOWS = """
import sys, torch
from weightpath.cli.interrupt import leaving_at_once
with leaving_at_once():
    print("ready", flush=True)
    while True:
        try:
            torch.zeros(1 << 16).sum()
        except BaseException:
            pass
"""
"""A command in a loop that lets no exception out, as torch's reading of arguments does at times."""
READS = """
import sys, termios
from weightpath.cli.interrupt import leaving_at_once
with leaving_at_once():
    raw = termios.tcgetattr(0)
    raw[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(0, termios.TCSANOW, raw)
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_ctrl_c_ends_what_lets_no_exception_out() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SWALLOWS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == f"weightpath: {MESSAGE}\n"


def test_a_terminal_gets_its_settings_and_its_cursor_back(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        [sys.executable, "-c", READS], stdin=theirs, stdout=subprocess.PIPE, stderr=theirs
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    assert termios.tcgetattr(theirs)[3] != before[3]
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert termios.tcgetattr(theirs) == before
    shown = os.read(ours, 4096).decode()
    assert "\x1b[?25h" in shown
    assert MESSAGE in shown
    for end in (ours, theirs):
        os.close(end)


def test_the_handler_of_before_is_back_afterwards_and_other_threads_set_none() -> None:
    before = signal.getsignal(signal.SIGINT)
    with leaving_at_once():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    seen: list[object] = []

    def elsewhere() -> None:
        with leaving_at_once():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [before]


def test_the_first_ctrl_c_is_noted_and_the_second_does_what_it_did_before() -> None:
    seen: list[int] = []

    def handler(*_: object) -> None:
        seen.append(1)

    before = signal.signal(signal.SIGINT, handler)
    try:
        with stopping() as stopped:
            assert not stopped()
            signal.raise_signal(signal.SIGINT)
            assert stopped()
            assert seen == []
            signal.raise_signal(signal.SIGINT)
            assert seen == [1]
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
