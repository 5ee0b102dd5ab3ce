"""weightpath: pick, make, prove and run the low-bit weights that suit a device.

    profile = weightpath.probe()
    plan = weightpath.plan("demo", profile)
    weightpath.quantize("demo", "out", scheme="w4g64")
    print(weightpath.verify("out", "demo").fidelity.mean_kl)
    model = weightpath.load("out")

Importing this touches no device, reads no environment variable and loads neither torch nor
transformers; the functions do, when they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The room of the same name binds itself here when it is first imported, and would take the place
# of the function below. Imported now (it is empty), it does so before the function is defined.
import weightpath.quantize  # noqa: F401

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from weightpath.device.profile import HardwareProfile
    from weightpath.jobs.conversion import Converted
    from weightpath.jobs.plan import Plan
    from weightpath.jobs.quantize import Quantized
    from weightpath.jobs.verify import Verification, VerifyOptions

__all__ = ["convert", "load", "plan", "probe", "quantize", "verify"]


def probe(root: str | Path = "/", device: str | Path | None = None) -> HardwareProfile:
    """What a machine is: the one under `root`, or the shipped or JSON profile `device`."""
    from weightpath.device.probe import probe as run

    return run(root, device)


def plan(
    model: str | Path,
    profile: HardwareProfile | None = None,
    priority: str = "speed",
    runtime: str = "weightpath",
    head_bits: int = 8,
    group_size: int | None = None,
    context: int | None = None,
    sequences: int = 1,
    kv_dtype: str = "auto",
) -> Plan:
    """Which weight path MODEL should take on a device, why, and what becomes of every tensor.

    model: a folder, a GGUF file, a hub id, "demo", or a config.json alone. profile: default, this
    machine. priority: "speed" or "fidelity". runtime: weightpath, vllm, transformers or llama.cpp.
    head_bits: 16, 8, 4. context, sequences, kv_dtype: what the fit in memory is worked out for.
    """
    from weightpath.checkpoints.locate import config_of, open_model
    from weightpath.jobs.plan import plan_model
    from weightpath.jobs.shapes import ConfigOnly

    lone = str(model).endswith(".json")
    checkpoint = ConfigOnly(*config_of(model)) if lone else open_model(model)
    return plan_model(
        str(model), checkpoint, profile or probe(), priority, runtime, head_bits, group_size,
        context=context, sequences=sequences, kv_dtype=kv_dtype,
    )  # fmt: skip


def quantize(
    model: str | Path,
    folder: str | Path,
    scheme: str | None = None,
    head_bits: int = 8,
    search: bool = True,
    overwrite: bool = False,
    profile: HardwareProfile | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Quantized:
    """Make low-bit weights of MODEL in `folder` (compressed-tensors pack-quantized).

    scheme: int8, w4g64, w4g128-asym, ...; None takes the plan for `profile` (default, this
    machine). search False keeps every group's whole range. A killed run resumes.
    """
    from weightpath.jobs.make import make

    return make(str(model), Path(folder), scheme, head_bits, search, overwrite, profile, progress)


def convert(
    source: str | Path,
    to: str,
    folder: str | Path,
    exact_only: bool = False,
    overwrite: bool = False,
    group_size: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Converted:
    """Write a low-bit checkpoint in another format, and say per tensor what that keeps.

    source: a folder, a GGUF file or a hub id. to: compressed-tensors, awq, gptq, gptq_v2, int8 or
    gguf. exact_only refuses where any weight would change. group_size cuts groups into this size,
    which is exact. A killed run resumes.
    """
    from weightpath.jobs.convert import convert as run

    return run(
        str(source), to, Path(folder),
        exact_only=exact_only, overwrite=overwrite, group_size=group_size, progress=progress,
    )  # fmt: skip


def verify(
    folder: str | Path,
    reference: str | Path,
    options: VerifyOptions | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Verification:
    """What the low-bit weights in `folder` lost against MODEL `reference`'s own bf16."""
    from weightpath.engine.load import no_progress
    from weightpath.jobs.verify import verify_folder

    return verify_folder(Path(folder), str(reference), options, progress or no_progress)


def load(folder: str | Path, device: str = "cpu", **options: Any) -> PreTrainedModel:
    """A transformers model on the low-bit weights of `folder`; `generate` works as usual.

    options: dtype, backend, activation_bits, progress, engine, kv_cache, cache (see
    engine.load.load). On CUDA the graph engine generates where it takes the model.
    """
    from weightpath.engine.load import load as run

    if str(device).startswith("cuda"):
        options.setdefault("engine", "auto")
    return run(folder, device, **options)
