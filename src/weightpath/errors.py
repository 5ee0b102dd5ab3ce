"""What can go wrong, as one family.

Every message is one line that names the thing (usually a tensor), gives the numbers that were
found and wanted, and ends with the mend. The command line prints it and exits with code 2.
"""

from __future__ import annotations

LONGEST = 1000
"""Characters of a message. Names come from files, which may hold anything."""


class WeightpathError(Exception):
    """Base of the family. `exit_code` is what the command line returns."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, LONGEST))


class BadTensor(WeightpathError):
    """A tensor whose values or shape cannot be used.

    name: the tensor's name in its checkpoint. problem: what was found and wanted, with numbers.
    mend: what the user can do.
    """

    def __init__(self, name: str, problem: str, mend: str) -> None:
        self.name, self.problem, self.mend = name, problem, mend
        super().__init__(f"tensor {name}: {problem}; {mend}")


class BadCheckpoint(WeightpathError):
    """A checkpoint's files or configuration cannot be read, or do not add up."""

    def __init__(self, where: str, problem: str, mend: str) -> None:
        self.where, self.problem, self.mend = where, problem, mend
        super().__init__(f"{where}: {problem}; {mend}")


class BadRequest(WeightpathError):
    """What was asked for contradicts itself or cannot be had; says what would be accepted."""


class CannotRun(WeightpathError):
    """A kernel or backend was asked for by name where it cannot run; says why not."""


def printable(text: str, longest: int) -> str:
    """A text as one printable line, cut in the middle where it is longer."""
    if len(text) > 4 * longest:
        text = text[: 2 * longest] + text[-2 * longest :]
    plain = "".join(sign if sign.isprintable() else "?" for sign in " ".join(text.split()))
    if len(plain) <= longest:
        return plain
    half = (longest - 3) // 2
    return f"{plain[:half]}...{plain[-half:]}"
