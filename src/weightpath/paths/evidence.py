"""Evidence: measurements of a weight path on a class of device, one JSON file a record.

A path is verified on a device only by a record of that path, that device class and that runtime:

    path = record.path  and  device_class(profile) = record.device_class  and  runtime = ...

Records ship in `benchmarks/results/` (in a wheel: `weightpath/records/`); a user's own lie in
$WEIGHTPATH_RECORDS, else in $XDG_DATA_HOME/weightpath/records (by default ~/.local/share). Files
of another "kind" are other benchmark tables and are passed over; a file that is damaged is passed
over with a warning, since a bad file in a store must not stop a plan.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from weightpath.errors import BadRequest

KIND = "weightpath-evidence"
STORE_VARIABLE = "WEIGHTPATH_RECORDS"


@dataclass(frozen=True)
class Speed:
    """Tokens per second of a path and of the same model in bf16, in turns in one run.

    `ratio` is the median of path / bf16 over the pairs of turns, and `ratio_low`..`ratio_high`
    its spread over them. Above 1 the path is faster.
    """

    tokens_per_second: float
    bf16_tokens_per_second: float
    ratio: float
    ratio_low: float
    ratio_high: float

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise BadRequest(f"speed: {item.name} is {value!r}; give a number")
            if not (math.isfinite(value) and value > 0):
                raise BadRequest(f"speed: {item.name} is {value}; give a number above 0")
        if not self.ratio_low <= self.ratio <= self.ratio_high:
            raise BadRequest(
                f"speed: ratio {self.ratio} lies outside its spread {self.ratio_low}.."
                f"{self.ratio_high}; give low <= ratio <= high"
            )

    @property
    def verdict(self) -> str:
        """faster or slower than bf16 beyond the spread, else level."""
        if self.ratio_low > 1:
            return "faster"
        return "slower" if self.ratio_high < 1 else "level"


@dataclass(frozen=True)
class Record:
    """One measurement of one path on one machine."""

    path: str  # a name of the catalog
    device_class: str  # device_class(profile), such as x86_cpu/avx512_vnni
    model: str
    scheme: str  # Scheme.name of the linears
    decode: Speed  # batch 1
    date: str  # ISO 8601: a day, or a time
    version: str  # weightpath's
    prefill: Speed | None = None
    kld: float | None = None  # mean KL divergence from bf16, nats a token
    kld_text: str = ""  # what it was measured on
    runtime: str = "weightpath"
    kernel: str = ""  # what ran the linears
    profile: dict[str, Any] = field(default_factory=dict)  # device.profile.to_dict(...)
    source: str = ""  # the file it was read from; not stored in it

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.type == "str" and not isinstance(value, str):
                raise BadRequest(f"record: {item.name} is {value!r}; give a text")
        for name in ("path", "device_class", "model", "scheme", "date", "version"):
            if not getattr(self, name).strip():
                raise BadRequest(f"record: {name} is empty; give its name")
        if not isinstance(self.decode, Speed) or not isinstance(self.prefill, Speed | None):
            raise BadRequest("record: decode and prefill are speeds with a ratio and its spread")
        if not isinstance(self.profile, dict):
            raise BadRequest("record: profile is no object; give device.profile.to_dict(...)")
        kld = self.kld
        if kld is not None and not (
            isinstance(kld, int | float) and math.isfinite(kld) and kld >= 0
        ):
            raise BadRequest(f"record: kld is {kld!r}; give nats a token, 0 or more")

    def to_dict(self) -> dict[str, Any]:
        """The record as its file holds it, `kind` first and without `source`."""
        plain = asdict(self)
        del plain["source"]
        return {"kind": KIND} | plain


@dataclass(frozen=True)
class Evidence:
    """What the stores held: records in order of their files, and a sentence per damaged file."""

    records: tuple[Record, ...] = ()
    warnings: tuple[str, ...] = ()

    def of(self, path: str, device_class: str, runtime: str) -> tuple[Record, ...]:
        """The records that speak for one path on one class of device under one runtime."""
        wanted = (path, device_class, runtime)
        return tuple(r for r in self.records if (r.path, r.device_class, r.runtime) == wanted)


def shipped_folder() -> Path | None:
    """The records that came with this package: in a wheel, or in the checkout it runs from."""
    package = Path(__file__).resolve().parent.parent
    candidates = [package / "records"]
    if package.parent.name == "src":
        candidates.append(package.parent.parent / "benchmarks" / "results")
    return next((folder for folder in candidates if folder.is_dir()), None)


def user_folder() -> Path:
    """The user's own store; the environment is read now, not at import."""
    if own := os.environ.get(STORE_VARIABLE):
        return Path(own).expanduser()
    data = os.environ.get("XDG_DATA_HOME") or os.path.join(
        os.path.expanduser("~"), ".local", "share"
    )
    return Path(data) / "weightpath" / "records"


def load_records(folders: Iterable[Path | str] | None = None) -> Evidence:
    """Every record in `folders`, by default the shipped ones and the user's own.

    A folder that does not exist holds nothing. The same file name in two folders is two records.
    """
    if folders is None:
        shipped = shipped_folder()
        folders = ([shipped] if shipped else []) + [user_folder()]
    records: list[Record] = []
    warnings: list[str] = []
    for folder in folders:
        for file in sorted(Path(folder).glob("*.json")):
            try:
                record = _read(file)
            except (OSError, ValueError, RecursionError, BadRequest) as problem:
                warnings.append(f"record {file} is left out: {_one_line(problem)}")
            else:
                if record is not None:
                    records.append(record)
    return Evidence(tuple(records), tuple(warnings))


def save_record(record: Record, folder: Path | str | None = None) -> Path:
    """Write the record as one JSON file in `folder`, by default the user's store.

    The name follows from path, device class, model, scheme, runtime and date, so the same
    measurement of the same date replaces its older self. Written to a temporary name and moved.
    """
    target = Path(folder) if folder is not None else user_folder()
    target.mkdir(parents=True, exist_ok=True)
    parts = (record.path, record.device_class, record.model, record.scheme, record.runtime)
    file = target / ("--".join(_slug(part) for part in (*parts, record.date)) + ".json")
    try:
        text = json.dumps(record.to_dict(), indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as problem:
        raise BadRequest(
            f"record {file.name}: its profile is not plain JSON ({_one_line(problem)}); "
            "give device.profile.to_dict(...)"
        ) from None
    handle, temporary = tempfile.mkstemp(dir=target, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise
    return file


def _read(file: Path) -> Record | None:
    """The record in a file, or None if the file is of another kind."""
    data = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or data.get("kind") != KIND:
        return None
    known = {item.name for item in fields(Record)} - {"source"}
    required = ("path", "device_class", "model", "scheme", "decode", "date", "version")
    missing = [name for name in required if name not in data]
    if missing:
        raise BadRequest(f"record: {', '.join(missing)} missing; measure again and save it anew")
    values = {name: value for name, value in data.items() if name in known}
    for name in ("decode", "prefill"):
        if values.get(name) is not None:
            values[name] = _speed(values[name], name)
    return Record(**values, source=str(file))


def _speed(value: object, name: str) -> Speed:
    names = {item.name for item in fields(Speed)}
    if not isinstance(value, dict) or not names <= value.keys():
        raise BadRequest(f"record: {name} has not all of {', '.join(sorted(names))}")
    return Speed(**{key: value[key] for key in names})


def _slug(text: str) -> str:
    """Text as a file name's part: letters, digits, dot and dash; the rest becomes one dash."""
    return re.sub(r"[^a-zA-Z0-9.]+", "-", text).strip("-.") or "x"


def _one_line(problem: Exception) -> str:
    return " ".join(str(problem).split())
