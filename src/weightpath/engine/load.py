"""Models that generate: a float checkpoint, or a low-bit one on this project's modules.

Both are transformers models built the same way (skeleton.py), so that a difference between them is
a difference of weights. Tensors come one at a time and stay mapped from the file where their dtype
already fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel

from weightpath.checkpoints.audit import (
    audit_files,
    audit_qweight,
    require_sound,
    summarise,
)
from weightpath.checkpoints.audit_finding import Finding
from weightpath.checkpoints.gguf import GGUFCheckpoint
from weightpath.checkpoints.gguf_file import BLOCKS
from weightpath.checkpoints.low_bit import LowBitCheckpoint, open_low_bit
from weightpath.checkpoints.store import Checkpoint, SafetensorsCheckpoint, gguf_at
from weightpath.engine import graph_support, skeleton
from weightpath.engine.decode import NativeModel
from weightpath.engine.graph import GraphModel
from weightpath.engine.like_transformers import generate_like_transformers
from weightpath.engine.low_bit_module import module_of
from weightpath.engine.native_support import refusal
from weightpath.engine.places import check_places, read_checked, take_bias, tied_copy
from weightpath.engine.session import Engine
from weightpath.engine.tiles_cache import find, keep, key_of, start_reading
from weightpath.errors import BadCheckpoint, BadRequest, CannotRun
from weightpath.kernels import cpu
from weightpath.nn.joined_linear import JoinedLinear
from weightpath.nn.swap import (
    explain,
    replace_module,
    set_activation_bits,
    set_backend,
)

Progress = Callable[[str, int, int], None]
"""progress(label, done, total)."""
ENGINES = ("transformers", "native", "graph", "auto")


@dataclass(frozen=True)
class LowBitModel:
    """What `load` knows of a model, as `model.weightpath`. manifest: how the folder was made, {}
    where another tool made it. format: what it is in. notes: what reading it showed. floats: linears
    whose integers no module takes -> scheme and why; they run as floats. left_out: tensors that
    transformers' model has no use for. native: the engine of ours, native or graph, that sessions of
    this model run on; None: transformers'. from_cache: whether packed weights were mapped and nothing
    was packed."""

    where: str
    manifest: dict[str, Any]
    activation_bits: int
    model: PreTrainedModel = field(repr=False)
    format: str = ""
    notes: tuple[str, ...] = ()
    floats: dict[str, tuple[str, str]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    native: Engine | None = field(default=None, repr=False)
    from_cache: bool = False

    def explain(self) -> dict[str, dict[str, Any]]:
        """For every low-bit linear: its scheme, its kernel, and why not the others."""
        report = {_without_inner(name): row for name, row in explain(self.model).items()}
        for name, module in self.model.named_modules():
            if isinstance(module, JoinedLinear):
                report[_without_inner(name)] = explain(module)["inner"]
        for name, (scheme, why) in self.floats.items():
            report[name] = {"scheme": scheme, "kernel": "float", "rejected": [["low-bit", why]]}
        return report


def no_progress(label: str, done: int, total: int) -> None:
    """Show nothing."""


def load_float(
    checkpoint: Checkpoint,
    weights: torch.dtype = torch.bfloat16,
    compute: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> PreTrainedModel:
    """The float model of a checkpoint, its weights rounded to `weights`, run in `compute`.

    compute fp32 over bf16 weights leaves only the weights' own rounding in a comparison.
    """
    compute = compute or weights
    device = usable_device(device)
    model = skeleton.build(checkpoint.config, compute, checkpoint.where)
    tied = tied_copy(model, checkpoint)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in checkpoint.tensors:
            if name != tied:
                value = checkpoint.read(name)
                yield name, value.to(weights).to(compute) if value.is_floating_point() else value

    skeleton.fill(model, tensors(), checkpoint.where)
    return _ready(model, checkpoint.where, device)


def load(
    folder: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    backend: str | None = None,
    activation_bits: int | None = None,
    progress: Progress = no_progress,
    engine: str = "transformers",
    kv_cache: str = "bf16",
    cache: bool = True,
) -> PreTrainedModel:
    """A transformers model on the low-bit weights of `folder`; `generate` works as usual.

    dtype: of the float tensors and the arithmetic (default: the checkpoint's own). backend: a
    kernel by name, else the chooser's. activation_bits: 8 or 16 for the 4-bit linears (default:
    what the folder was made for, else 16). engine: what sessions and `generate` run on:
    "transformers"' modules, the "native" one (a whole step in C++, on the CPU), the "graph" one (a
    step replayed from a CUDA graph; in plain torch on the CPU), CannotRun where these do not take
    the model; or "auto", on the CPU native and on CUDA graph where it takes the model and a note
    where not. On both `generate` takes transformers' common arguments and refuses others by name.
    kv_cache: of the native engine, bf16, int8 (half the memory; on SmolLM2-135M KLD 7e-4 instead of
    5e-5, docs/experiments.md) or fp32. cache: where the native engine runs, keep the packed weights
    in a hidden file beside the checkpoint and map it at the next load (tiles_cache.py).
    Raises BadCheckpoint or BadTensor with the mend.
    """
    if engine not in ENGINES:
        raise BadRequest(f"engine '{engine}': unknown; use {', '.join(ENGINES)}")
    if kv_cache != "bf16" and engine != "native":
        raise BadRequest(f"kv_cache {kv_cache} is the native engine's; load with engine native too")
    if engine == "native" and backend is not None:
        raise BadRequest(
            f"engine native and backend '{backend}': it runs on the compiled kernels alone; "
            "leave one of them out"
        )
    checkpoint = open_low_bit(Path(folder))
    device = usable_device(device)
    bits = (
        checkpoint.manifest.get("activation_bits", 16)
        if activation_bits is None
        else activation_bits
    )
    if bits not in (8, 16):
        raise BadRequest(f"{checkpoint.where}: {bits}-bit activations; use 8 or 16")
    dtype = dtype or model_dtype(checkpoint.config)
    keeps = cache and engine in ("native", "auto") and backend is None
    keeps = keeps and device.type == "cpu" and cpu.refusal() is None
    key = key_of(checkpoint, dtype) if keeps else ""
    reading = start_reading(checkpoint, key) if keeps else None
    model = skeleton.build(checkpoint.config, dtype, checkpoint.where)
    if skeleton.head_name(model) in checkpoint.parts:  # a packed head shares no float matrix
        model.config.tie_word_embeddings = False
    linears = skeleton.linears(model)
    tables = check_places(checkpoint, model, linears)
    floats = dict(checkpoint.floats)
    tied = tied_copy(model, checkpoint.source)
    total = len(checkpoint.parts)
    run_as_floats: dict[str, tuple[str, str]] = {}
    opened = checkpoint.source if isinstance(checkpoint.source, SafetensorsCheckpoint) else None
    files = audit_files(Path(checkpoint.where), opened)
    require_sound(files, checkpoint.where)
    names = [name for name in checkpoint.parts if name not in tables]
    kept = "" if reading is None else find(checkpoint, reading, linears, names)
    findings: list[Finding] = [] if isinstance(kept, str) else list(kept.findings)
    empty = [name for name in floats if skeleton.empty_bias(linears, name, checkpoint.source.read)]
    for name in empty:
        del floats[name]
    for done, name in enumerate(names, 1):
        bias = take_bias(checkpoint, name, linears[name], floats, dtype)
        if isinstance(kept, str):
            read = read_checked(checkpoint, name, linears[name])
            if read.qweight is not None:
                found = audit_qweight(name, read.qweight, read.column_scales)
                findings.extend(finding for finding in found if finding.severity != "note")
            built = module_of(name, read, bias, dtype)
            scheme = "float" if read.qweight is None else read.qweight.scheme.name
        else:
            built, scheme = kept.linear(name, bias), kept.schemes.get(name, ("", ""))[0]
        if built.why_float:
            run_as_floats[name] = (scheme, built.why_float)
        replace_module(model, name, built.module)
        progress("loading", done, len(names))
    made: dict[str, Tensor] = {}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in (*(f"{table}.weight" for table in tables), *floats):
            if name == tied:
                continue
            value = None if isinstance(kept, str) else kept.floats.get(name)
            if value is None:
                value, computed = _float_tensor(checkpoint, name, dtype)
                if computed:
                    made[name] = value
            yield name, value

    left_out = skeleton.fill(model, tensors(), checkpoint.where)
    _ready(model, checkpoint.where, device)
    set_activation_bits(model, bits)
    set_backend(model, backend)
    warned = [finding for finding in (*files, *findings) if finding.severity != "note"]
    notes = (*checkpoint.notes, *summarise(warned, linears=total))
    model.weightpath = LowBitModel(  # type: ignore[assignment]
        checkpoint.where, checkpoint.manifest, bits, model, checkpoint.format, notes,
        run_as_floats, (*empty, *left_out), from_cache=not isinstance(kept, str),
    )  # fmt: skip
    own = engine if engine != "auto" else "graph" if device.type == "cuda" else "native"
    if own in ("native", "graph") and not (engine == "auto" and backend is not None):
        attached = _attach(model, own, kv_cache, required=engine != "auto")
        if keeps and isinstance(attached, NativeModel) and isinstance(kept, str):
            progress("keeping", 0, 1)
            said = keep(
                checkpoint, key, model, names, attached.packed_blocks, made, run_as_floats, findings
            )
            progress("keeping", 1, 1)
            _note(model, *filter(None, (kept, said)))
    return model


def _float_tensor(
    checkpoint: LowBitCheckpoint, name: str, dtype: torch.dtype
) -> tuple[Tensor, bool]:
    """A float tensor, or a low-bit table that is looked up, in `dtype`; and whether it had to be
    computed: else it is mapped from the file."""
    module, source = name.removesuffix(".weight"), checkpoint.source
    if module in checkpoint.parts:
        return checkpoint.read_linear(module).weight().to(dtype), True
    stored = source.read(name)
    value = stored.to(dtype) if stored.is_floating_point() else stored
    blocks = isinstance(source, GGUFCheckpoint) and source.stored(name)[0] in BLOCKS
    return value, blocks or value is not stored


def _note(model: PreTrainedModel, *notes: str) -> None:
    about: Any = model.weightpath
    model.weightpath = replace(about, notes=(*about.notes, *notes))  # type: ignore[assignment]


def _attach(
    model: PreTrainedModel, engine: str, kv_cache: str, required: bool
) -> NativeModel | GraphModel | None:
    """An engine of ours, "native" or "graph", beside the model, for its sessions and as its
    `generate`; a note where it does not take the model, or CannotRun where it is required."""
    about: Any = model.weightpath
    reason = refusal(model) if engine == "native" else graph_support.refusal(model)
    if reason is not None:
        if required:
            raise CannotRun(f"{about.where}: the {engine} engine does not run it: {reason}")
        _note(model, f"runs on transformers' modules, not on the {engine} engine: {reason}")
        return None
    own = NativeModel(model, cache=kv_cache) if engine == "native" else GraphModel.of(model)
    model.weightpath = replace(about, native=own)  # type: ignore[assignment]

    def generate(*arguments: Any, **named: Any) -> Tensor:
        """`generate_like_transformers` with the model's generation config as it is at the call."""
        return generate_like_transformers(
            own, *arguments, default_config=model.generation_config, **named
        )

    model.generate = generate  # type: ignore[assignment]
    return own


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a checkpoint's folder, or of a GGUF file. BadCheckpoint where it has none."""
    place, file = str(folder), gguf_at(Path(folder))
    gguf = None if file is None else GGUFCheckpoint(file)
    if gguf is not None:  # its tokenizer's files live as long as it does
        place = str(gguf.companions[0].parent)
    try:
        return AutoTokenizer.from_pretrained(place)
    except Exception as error:  # what damaged files raise is not one family
        raise BadCheckpoint(str(folder), f"has no tokenizer that loads ({_said(error)})",
                            "copy the model's tokenizer files into it") from error  # fmt: skip


def usable_device(device: str | torch.device) -> torch.device:
    """The torch device of that name. BadRequest where there is none such here."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch's own, by build and device
        reason = str(error).splitlines()[0][:120]
        raise BadRequest(f"device '{device}' cannot be used ({reason}); use cpu, or cuda where there is a GPU") from None  # fmt: skip
    return torch.device(device)


def model_dtype(config: dict[str, Any]) -> torch.dtype:
    """The float dtype that a config.json names (dtype or torch_dtype, nested too), else bf16."""
    for section in (config, config.get("text_config") or {}):
        name = section.get("dtype") or section.get("torch_dtype")
        found = getattr(torch, str(name).removeprefix("torch."), None) if name else None
        if isinstance(found, torch.dtype):
            return found
    return torch.bfloat16


def _without_inner(name: str) -> str:
    """A linear's own name, without those of what it lies behind."""
    while name.endswith(".inner"):
        name = name.removesuffix(".inner")
    return name


def _said(error: Exception) -> str:
    """Another library's exception in one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def _ready(model: PreTrainedModel, where: str, device: str | torch.device) -> PreTrainedModel:
    skeleton.finish(model, where)
    settings = Path(where) / "generation_config.json"
    if settings.is_file() and model.can_generate():
        try:
            model.generation_config = GenerationConfig.from_pretrained(where)
        except Exception as error:  # what a damaged file raises is not one family
            raise BadCheckpoint(str(settings), f"does not load ({_said(error)})",
                                "mend it, or remove it for the defaults") from error  # fmt: skip
    if torch.device(device).type != "cpu":  # files are read to the CPU
        model.to(device)  # type: ignore[arg-type]
    return model.eval()
