"""weightpath probe: what this machine is, and where each fact came from."""

from __future__ import annotations

import typer

from weightpath.cli.show import emit_json, size, stdout, table
from weightpath.device.probe import probe, shipped_profiles
from weightpath.device.profile import HardwareProfile, device_class, to_dict

NAME = "probe"
EXAMPLE = (
    "Example: weightpath probe --json > laptop.json; weightpath plan demo --device laptop.json"
)


def command(
    root: str = typer.Option("/", help="Read /proc and /sys under this folder instead."),
    device: str = typer.Option(
        None, help=f"A JSON profile, or a shipped one: {', '.join(shipped_profiles())}."
    ),
    json: bool = typer.Option(
        False, "--json", help="Print the profile as JSON; `--device FILE` reads it back."
    ),
) -> None:
    """Print what the machine is, with the source of every fact."""
    profile = probe(root, device)
    if json:
        emit_json(to_dict(profile))
    else:
        show_profile(profile, sources=True)


def show_profile(profile: HardwareProfile, sources: bool = False) -> None:
    """The profile as rows; with sources, one a fact."""
    flags = [flag for flag in NOTABLE_FLAGS if flag in profile.cpu_flags]
    capability = ".".join(map(str, profile.gpu_capability)) if profile.gpu_capability else ""
    rows = [
        ("class", device_class(profile), ""),
        ("processor", f"{profile.cpu_model or 'unknown'} ({profile.arch})", "cpu_model"),
        ("instructions", ", ".join(flags) or "none of note", "cpu_flags"),
        (
            "cores",
            f"{profile.logical_cores} usable, {profile.physical_cores} physical",
            "logical_cores",
        ),
        (
            "clusters",
            " + ".join(str(len(ids)) for ids in profile.clusters) or "unknown",
            "clusters",
        ),
        (
            "memory",
            f"{size(profile.ram_total)}, {size(profile.ram_available)} available",
            "ram_total",
        ),
        ("accelerator", profile.accelerator, "accelerator"),
    ]
    if profile.gpu_name:
        gpu = f"{profile.gpu_name}, {size(profile.gpu_memory)}, {profile.gpu_sm_count} SMs, capability {capability}"
        rows.append(("gpu", gpu, "gpu_name"))
    rows.append(("floats", _floats(profile), "supports_bf16"))
    rows.append(("system", profile.host_os, "host_os"))
    for seen in profile.accelerators:
        state = "usable" if seen.usable else f"not usable: {seen.reason}"
        rows.append((f"seen: {seen.kind}", f"{seen.vendor} {seen.name}, {state}", "accelerators"))
    grid = table("device", "", "source") if sources else table("device", "")
    for column in grid.columns:
        column.justify = "left"
    for name, value, key in rows:
        grid.add_row(name, value, *([profile.sources.get(key, "")] if sources else []))
    stdout.print(grid)


NOTABLE_FLAGS = (
    "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16",
    "neon", "dotprod", "i8mm", "sve", "bf16", "fp16",
)  # fmt: skip


def _floats(profile: HardwareProfile) -> str:
    known = [
        name
        for name, has in (("bf16", profile.supports_bf16), ("fp16", profile.supports_fp16))
        if has
    ]
    return ", ".join([*known, "fp32"])
