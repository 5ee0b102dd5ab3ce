"""The report: one HTML file that needs nothing else, for a person to read or send on.

Filled from report.html.j2 with every value escaped; plots are inline SVG. What data holds is
described in data.py; a section without data is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, Undefined
from markupsafe import Markup

from weightpath.errors import BadRequest
from weightpath.report.card import ways_to_run
from weightpath.report.data import ReportData
from weightpath.report.plots import by_confidence, kl_distribution

ABSENT = "–"
"""Shown for a value that a section does not hold."""


def write_report(path: str | Path, data: ReportData, overwrite: bool = False) -> Path:
    """Write the report to `path` through a temporary name, and return the path.

    BadRequest where the file exists and `overwrite` is false, or its folder is absent.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise BadRequest(f"report {path}: the file exists; give another name or allow overwriting")
    if not path.parent.is_dir():
        raise BadRequest(f"report {path}: folder {path.parent} does not exist; create it first")
    partial = path.with_name(path.name + ".partial")
    partial.write_text(render(data), encoding="utf-8")
    partial.replace(path)
    return path


def render(data: ReportData) -> str:
    """The report as HTML text."""
    environment = Environment(
        loader=PackageLoader("weightpath.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "count": _count,
        "size": _size,
        "number": _number,
        "share": _share,
        "interval": _interval,
        "share_interval": _share_interval,
        "ratio": _ratio,
        "listed": _listed,
    }
    return environment.get_template("report.html.j2").render(
        data,
        run_with=data.get("run_with") or (ways_to_run(data) if "written" in data else []),
        kl_plot=_kl_plot(data),
        confidence_plot=_confidence_plot(data),
        device_rows=_device_rows(data.get("device", {})),
    )


def _kl_plot(data: ReportData) -> Markup | None:
    fidelity = data.get("fidelity", {})
    if not (summary := fidelity.get("summary")):
        return None
    curves = {"these weights": summary["kl_curve"]}
    if floor := fidelity.get("noise_floor"):
        curves["noise floor"] = floor["kl_curve"]
    return Markup(kl_distribution(curves))  # drawn here from numbers: nothing to escape


def _confidence_plot(data: ReportData) -> Markup | None:
    summary = data.get("fidelity", {}).get("summary")
    return Markup(by_confidence(summary["by_confidence"])) if summary else None


def _device_rows(device: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(what, value, where it was read) for the facts that were found."""
    sources = device.get("sources", {})

    def source(*fields: str) -> str:
        return "; ".join(dict.fromkeys(sources[f] for f in fields if sources.get(f)))

    rows = []
    if device.get("cpu_model") or device.get("arch"):
        cpu = " · ".join(str(device[f]) for f in ("cpu_model", "arch") if device.get(f))
        rows.append(("processor", cpu, source("cpu_model", "arch")))
    if "logical_cores" in device:
        cores = f"{device['logical_cores']} usable"
        if device.get("physical_cores"):
            cores += f", {device['physical_cores']} physical"
        rows.append(("cores", cores, source("logical_cores", "physical_cores")))
    if flags := device.get("cpu_flags"):
        rows.append(("instructions", ", ".join(sorted(flags)), source("cpu_flags")))
    if device.get("ram_total"):
        memory = _size(device["ram_total"])
        if device.get("ram_available"):
            memory += f", {_size(device['ram_available'])} available"
        rows.append(("memory", memory, source("ram_total", "ram_available")))
    if device.get("accelerator", "none") != "none":
        name = " · ".join(str(device[f]) for f in ("accelerator", "gpu_name") if device.get(f))
        if device.get("gpu_memory"):
            name += f", {_size(device['gpu_memory'])}"
        rows.append(("accelerator", name, source("accelerator", "gpu_name")))
    for other in device.get("accelerators", ()):
        if not other["usable"]:
            rows.append(("not usable", f"{other['name']}: {other['reason']}", ""))
    if device.get("host_os"):
        rows.append(("system", str(device["host_os"]), source("host_os")))
    return rows


def _missing(value: Any) -> bool:
    return value is None or isinstance(value, Undefined)


def _count(value: Any) -> str:
    return ABSENT if _missing(value) else f"{value:,}"


def _size(value: Any) -> str:
    """Bytes in decimal units, as disks and file managers count."""
    if _missing(value):
        return ABSENT
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return f"{value / factor:.1f} {unit}"
    return f"{value} bytes"


def _number(value: Any, digits: int = 3) -> str:
    """`digits` significant digits, without an exponent where the number is of common size."""
    if _missing(value):
        return ABSENT
    if value and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}"
    plain = f"{value:#.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}"
    return "0" if value == 0 else plain.rstrip(".")


def _share(value: Any) -> str:
    return ABSENT if _missing(value) else f"{100 * value:.1f}%"


def _interval(interval: Any, digits: int = 3) -> str:
    return f"{_number(interval['low'], digits)} to {_number(interval['high'], digits)}"


def _share_interval(interval: Any) -> str:
    return f"{_share(interval['low'])} to {_share(interval['high'])}"


def _ratio(ratio: Any) -> str:
    """As `str(bench.timing.Ratio)`, from its dict."""
    if _missing(ratio):
        return ABSENT
    text = f"{ratio['median']:.2f}× ({ratio['low']:.2f} to {ratio['high']:.2f})"
    return text if ratio["decided"] else f"{text}, within the spread"


def _listed(values: Any) -> str:
    return (
        ABSENT
        if _missing(values)
        else ", ".join(f"{count} {name}" for name, count in values.items())
    )
