"""From a float model to proven low-bit weights on one device, in one go.

probe -> plan -> quantize -> inspect -> verify -> bench -> a generated answer -> report and record.
Each stage hands its result to `stage` as it is finished, so that a caller can show it at once.
"""

from __future__ import annotations

import datetime
import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from weightpath.bench.decode import SpeedResult, measure_speed
from weightpath.checkpoints.demo import cache_folder, fetch_demo
from weightpath.checkpoints.locate import open_model
from weightpath.checkpoints.store import Checkpoint
from weightpath.device.probe import probe
from weightpath.device.profile import HardwareProfile, device_class, to_dict
from weightpath.engine import skeleton
from weightpath.engine.generate import Answer, answer
from weightpath.engine.load import (
    Progress,
    load,
    load_float,
    load_tokenizer,
    no_progress,
)
from weightpath.errors import BadRequest
from weightpath.fidelity.text import Window
from weightpath.jobs.inspect import Inspection, inspect_folder
from weightpath.jobs.plan import Plan, plan_model
from weightpath.jobs.quantize import Quantized, Recipe, quantize_checkpoint
from weightpath.jobs.summary import report_data, write_text
from weightpath.jobs.verify import (
    Verification,
    VerifyOptions,
    compute_dtype,
    load_candidate,
    require_decoder,
    text_windows,
    verify_models,
)
from weightpath.nn.swap import explain
from weightpath.paths.evidence import Record, Speed, save_record
from weightpath.report.card import model_card
from weightpath.report.html import write_report
from weightpath.version import __version__

QUESTION = "What is a hash table, and when is it a good choice? Answer in three sentences."


@dataclass(frozen=True)
class BuildOptions:
    """What a build is asked for. output None: a folder under the user's cache, named by model and
    path, and made anew each time. record: whether the measurement goes into the user's store."""

    output: Path | None = None
    priority: str = "speed"
    runtime: str = "weightpath"
    head_bits: int = 8
    group_size: int | None = None
    overwrite: bool = False
    verify: VerifyOptions = field(default_factory=lambda: VerifyOptions(limit=10, prompt_tokens=32))
    prompt_length: int = 128
    decode_tokens: int = 8
    rounds: int = 3
    speed_seconds: float = 60.0
    question: str = QUESTION
    answer_tokens: int = 40
    record: bool = True


@dataclass(frozen=True)
class Build:
    """Everything that a build found out, and where its files are."""

    model: str
    profile: HardwareProfile
    plan: Plan
    quantized: Quantized
    inspection: Inspection
    verification: Verification
    speed: SpeedResult
    question: str
    answer: Answer
    folder: Path
    report: Path
    record: Path | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "model": self.model,
            "device": to_dict(self.profile),
            "plan": self.plan.to_dict(),
            "written": self.inspection.to_dict(),
            "fidelity": self.verification.to_dict(),
            "speed": self.speed.to_dict(),
            "answer": {"prompt": self.question, **asdict(self.answer)},
            "folder": str(self.folder),
            "report": str(self.report),
            "record": str(self.record) if self.record else None,
        }


Stage = Callable[[str, Any], None]
"""stage(name, result): device, plan, quantized, written, fidelity, speed, answer, files."""


def build(
    model: str,
    options: BuildOptions | None = None,
    profile: HardwareProfile | None = None,
    stage: Stage = lambda name, result: None,
    progress: Progress = no_progress,
    command: str = "",
) -> Build:
    """Build, prove and measure MODEL's low-bit weights on this machine.

    Raises BadRequest where the plan keeps the model's dtype (nothing to build) or needs an export.
    """
    options = options or BuildOptions()
    profile = profile or probe()
    stage("device", profile)
    if model == "demo":
        fetch_demo(progress=progress)
    checkpoint = open_model(model)
    plan = plan_model(model, checkpoint, profile, options.priority, options.runtime,
                      options.head_bits, options.group_size)  # fmt: skip
    stage("plan", plan)
    assert plan.selection is not None
    path = plan.selection.path
    if path.scheme is None or path.name.startswith("export"):
        raise BadRequest(
            f"path {path.name} on this device: {path.built_by}; name a scheme with `weightpath quantize`"
        )
    # Needed after the work; what is not there is said before it.
    tokenizer = load_tokenizer(_source_folder(checkpoint))
    text = text_windows(tokenizer, options.verify)
    require_decoder(skeleton.build(checkpoint.config, torch.bfloat16, checkpoint.where))
    folder = options.output or default_folder(model, plan)
    overwrite = options.overwrite or options.output is None
    recipe = Recipe(Path(model).name, __version__, path.name, plan.activation_bits)
    quantized = quantize_checkpoint(checkpoint, plan.tensors, folder, recipe, overwrite, progress)
    inspection = inspect_folder(folder)
    stage("written", inspection)
    verification = _verify(checkpoint, folder, tokenizer, text, options, progress)
    stage("fidelity", verification)
    speed, reply, kernel = _run(checkpoint, folder, tokenizer, plan, options, progress)
    stage("speed", speed)
    stage("answer", (options.question, reply))
    saved = None
    if options.record:
        saved = save_record(_record(model, plan, profile, verification, speed, kernel))
    data = report_data(
        model, profile, plan, inspection, verification, speed, options.question, reply, command
    )
    report = folder / "report.html"
    write_report(report, data, overwrite=True)
    write_text(folder / "README.md", model_card(data))
    result = Build(model, profile, plan, quantized, inspection, verification, speed,
                   options.question, reply, folder, report, saved)  # fmt: skip
    stage("files", result)
    return result


def default_folder(model: str, plan: Plan) -> Path:
    """Under the user's cache: builds/<model>-<path>-<scheme>."""
    scheme = plan.scheme.with_activations(16).name if plan.scheme else "float"
    return cache_folder() / "builds" / f"{Path(model).name}-{plan.path_name}-{scheme}"


def _source_folder(checkpoint: Checkpoint) -> Path:
    """Where the source's tokenizer is, if it has one."""
    files = checkpoint.companions
    return files[0].parent if files else Path(checkpoint.where)


def _verify(
    checkpoint: Checkpoint,
    folder: Path,
    tokenizer: Any,
    text: tuple[list[Window], str],
    options: BuildOptions,
    progress: Progress,
) -> Verification:
    """Fidelity in fp32 arithmetic where memory allows; both models are released afterwards."""
    chosen = options.verify
    dtype = compute_dtype(checkpoint, chosen.compute)
    reference = load_float(checkpoint, torch.bfloat16, dtype, chosen.device)
    model = load_candidate(folder, dtype, chosen, progress)
    found = verify_models(reference, model, tokenizer, *text, chosen, progress)
    del reference, model
    gc.collect()  # model.weightpath points back to its model, a cycle
    return found


def _run(
    checkpoint: Checkpoint,
    folder: Path,
    tokenizer: Any,
    plan: Plan,
    options: BuildOptions,
    progress: Progress,
) -> tuple[SpeedResult, Answer, str]:
    """Speed of both in bf16, in turns; an answer from the low-bit one; the kernels that ran it."""
    device = options.verify.device
    reference = load_float(checkpoint, torch.bfloat16, device=device)
    backend, bits = options.verify.backend, plan.activation_bits
    engine = "auto" if backend is None else "transformers"
    model = load(folder, device, torch.bfloat16, backend, bits, engine=engine)
    step = 0

    def sampled(name: str) -> None:
        nonlocal step
        step += 1
        progress(
            f"measuring speed: {name}", min(step, 2 * options.rounds + 2), 2 * options.rounds + 2
        )

    speed = measure_speed(
        {"bf16": reference, plan.path_name: model},
        options.prompt_length, options.decode_tokens, options.rounds, options.speed_seconds, sampled,
    )  # fmt: skip
    reply = answer(
        model, tokenizer, [{"role": "user", "content": options.question}], options.answer_tokens
    )
    kernels = " and ".join(sorted({_named(row) for row in explain(model).values()}))
    own: Any = model.weightpath.native  # type: ignore[union-attr]
    return speed, reply, kernels if own is None else f"{own.name} engine, {kernels}"


def _named(row: dict[str, object]) -> str:
    """A kernel and what of it runs: "cpu (avx512-vnni)"."""
    found = row["instruction_set"]
    return f"{row['kernel']} ({found})" if found else str(row["kernel"])


def _record(
    model: str,
    plan: Plan,
    profile: HardwareProfile,
    verification: Verification,
    speed: SpeedResult,
    kernel: str,
) -> Record:
    """The measurement as evidence for this path on this class of device."""
    return Record(
        path=plan.path_name,
        device_class=device_class(profile),
        model=Path(model).name,
        scheme=plan.scheme.name if plan.scheme else "float",
        decode=_speed(speed, "decode"),
        prefill=_speed(speed, "prefill"),
        date=datetime.date.today().isoformat(),
        version=__version__,
        kld=verification.fidelity.mean_kl.value,
        kld_text=verification.text,
        kernel=kernel,
        profile=to_dict(profile),
    )


def _speed(speed: SpeedResult, what: str) -> Speed:
    first, second = speed.models
    ratio = getattr(second, f"{what}_ratio")
    return Speed(
        tokens_per_second=getattr(second, what).median,
        bf16_tokens_per_second=getattr(first, what).median,
        ratio=ratio.median,
        ratio_low=ratio.low,
        ratio_high=ratio.high,
    )
