"""What the benchmark scripts share: where data lies, and one way to end."""

from __future__ import annotations

import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

from weightpath.device.probe import probe
from weightpath.device.profile import device_class, to_dict
from weightpath.version import __version__

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED = REPOSITORY.parent / "shared"
RESULTS = REPOSITORY / "benchmarks" / "results"


def shared(path: str) -> Path:
    """A file or folder of the data that lies beside the repository; exits saying so if absent."""
    found = SHARED / path
    if not found.exists():
        sys.exit(f"needs ../shared/{path}, which is not here")
    return found


def finish(kind: str, body: dict[str, Any]) -> None:
    """Write results/<kind>.json with the machine's profile, and print the body as one JSON line."""
    profile = probe()
    record = {
        "kind": kind,
        "date": date.today().isoformat(),
        "version": __version__,
        "device_class": device_class(profile),
        **body,
        "profile": to_dict(profile),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{kind}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({"kind": kind, **body}))
