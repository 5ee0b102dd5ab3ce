"""Quantize a model by a scheme or by the device's plan, and leave its card beside the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from weightpath.checkpoints.locate import open_model
from weightpath.device.probe import probe
from weightpath.device.profile import HardwareProfile
from weightpath.engine.load import no_progress
from weightpath.errors import BadRequest
from weightpath.jobs.inspect import inspect_folder
from weightpath.jobs.plan import plan_model, plan_scheme
from weightpath.jobs.quantize import Quantized, Recipe, quantize_checkpoint
from weightpath.jobs.summary import command_line, report_data, write_text
from weightpath.report.card import model_card
from weightpath.scheme import Scheme
from weightpath.version import __version__


def make(
    model: str,
    folder: Path,
    scheme: str | None = None,
    head_bits: int = 8,
    search: bool = True,
    overwrite: bool = False,
    profile: HardwareProfile | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    priority: str = "speed",
    runtime: str = "weightpath",
    group_size: int | None = None,
) -> Quantized:
    """Write the low-bit checkpoint of MODEL into `folder`, with a README.md for it.

    Where `scheme` is named, `priority` and `group_size`, which are for the plan, are refused.
    """
    if scheme is not None and (priority != "speed" or group_size is not None):
        given = f"group size {group_size}" if group_size is not None else f"priority {priority}"
        raise BadRequest(f"{given} beside scheme {scheme}: the scheme says it all; leave one out")
    checkpoint = open_model(model)
    profile = profile or probe()
    if scheme is None:
        plan = plan_model(model, checkpoint, profile, priority, runtime, head_bits, group_size)
    else:
        plan = plan_scheme(model, checkpoint, Scheme.parse(scheme), head_bits, runtime, profile)
    recipe = Recipe(Path(model).name, __version__, plan.path_name, plan.activation_bits, search)
    done = quantize_checkpoint(
        checkpoint, plan.tensors, folder, recipe, overwrite, progress or no_progress
    )
    command = command_line("quantize", f"{Path(model).name} -o DIR", head_bits, priority, runtime,
                           group_size, scheme) + ("" if search else " --no-search")  # fmt: skip
    data = report_data(model, profile, plan, inspect_folder(folder), command=command)
    write_text(folder / "README.md", model_card(data))
    return done
