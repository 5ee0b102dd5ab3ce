"""Prove what a low-bit checkpoint lost against the float model it was made from."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from weightpath.checkpoints.locate import locate, open_model
from weightpath.checkpoints.store import Checkpoint
from weightpath.device.probe import probe
from weightpath.engine.load import Progress, load, load_float, load_tokenizer, no_progress
from weightpath.errors import BadRequest
from weightpath.fidelity.greedy import (
    MINIMUM_PROMPTS,
    GreedyResult,
    Prompt,
    greedy_agreement,
    read_prompts,
)
from weightpath.fidelity.logits import compare, noise_floor
from weightpath.fidelity.metrics import FidelitySummary, summarize
from weightpath.fidelity.text import Window, default_documents, read_documents, windows


@dataclass(frozen=True)
class VerifyOptions:
    """How much is measured. text: a file, or None for the text that Python carries. length: tokens
    a window; limit: windows at most. contiguous: cut the whole text in a row, as published figures
    do. compute: of the reference (and of a candidate on transformers' modules): float32, bfloat16,
    or None to take fp32 where the models fit in half of the memory. engine and kv_cache: what the
    candidate runs on, as in `engine.load.load`; "auto" is what `run` takes.
    """

    text: Path | None = None
    length: int = 512
    limit: int = 24
    contiguous: bool = False
    compute: str | None = None
    prompts: Path | None = None
    prompt_tokens: int = 48
    floor_windows: int = 4
    device: str = "cpu"
    activation_bits: int | None = None
    backend: str | None = None
    engine: str = "auto"
    kv_cache: str = "bf16"


@dataclass(frozen=True)
class Verification:
    """What was lost, on which text, beside the reference's own noise. compute: the reference's
    arithmetic. engine: "native" or "transformers", which ran the candidate; kv_cache: its keys and
    values, None on transformers (they are as `compute` there, and no cache is kept). notes: what
    opening and auditing the low-bit weights showed."""

    text: str
    compute: str
    activation_bits: int
    fidelity: FidelitySummary
    noise_floor: FidelitySummary
    greedy: GreedyResult
    notes: tuple[str, ...] = ()
    engine: str = "transformers"
    kv_cache: str | None = None

    @property
    def ran(self) -> str:
        """What ran the candidate, in words."""
        engine = "transformers' modules"
        if self.kv_cache is not None:
            engine = f"the {self.engine} engine, keys and values in {self.kv_cache}"
        return f"{engine}, {self.activation_bits}-bit activations"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "text": self.text,
            "compute": self.compute,
            "activation_bits": self.activation_bits,
            "engine": self.engine,
            "kv_cache": self.kv_cache,
            "fidelity": self.fidelity.to_dict(),
            "noise_floor": self.noise_floor.to_dict(),
            "greedy": self.greedy.to_dict(),
            "notes": list(self.notes),
        }


def verify_folder(
    folder: Path,
    reference: str,
    options: VerifyOptions | None = None,
    progress: Progress = no_progress,
) -> Verification:
    """Compare a low-bit folder, as `run` runs it, with MODEL's own bf16 weights."""
    options = options or VerifyOptions()
    checkpoint = open_model(reference)
    dtype = compute_dtype(checkpoint, options.compute)
    tokenizer = load_tokenizer(tokenizer_folder(reference, folder))
    cut, description = text_windows(tokenizer, options)
    greedy_prompts(options)  # what is wrong with them is said before the work
    float_model = load_float(checkpoint, torch.bfloat16, dtype, options.device)
    model = load_candidate(folder, dtype, options, progress)
    return verify_models(float_model, model, tokenizer, cut, description, options, progress)


def load_candidate(
    folder: Path, dtype: torch.dtype, options: VerifyOptions, progress: Progress = no_progress
) -> Any:
    """The low-bit model as options.engine says, read from its own files, nothing kept beside them.

    On the native engine in the checkpoint's own dtype, as `run` has it; on transformers' modules in
    `dtype`, so that only the weights' loss is seen.
    Where "auto" finds that the native engine does not take the model, its note says why.
    """
    wanted, note = options.engine, ""
    if wanted == "auto" and options.backend is not None:
        wanted = "transformers"  # a backend is of the modules
    if wanted != "transformers":
        model = load(
            folder, options.device, None, options.backend, options.activation_bits, progress,
            wanted, options.kv_cache, cache=False,
        )  # fmt: skip
        about: Any = model.weightpath
        if about.native is not None:
            return model
        note = about.notes[-1]
        del model, about
        gc.collect()  # the model and its `weightpath` point to each other
    model = load(
        folder, options.device, dtype, options.backend, options.activation_bits, progress,
        "transformers", options.kv_cache,
    )  # fmt: skip
    if note:
        about = model.weightpath
        model.weightpath = replace(about, notes=(*about.notes, note))  # type: ignore[assignment]
    return model


def verify_models(
    reference: Any,
    model: Any,
    tokenizer: Any,
    cut: list[Window],
    description: str,
    options: VerifyOptions,
    progress: Progress = no_progress,
) -> Verification:
    """The same for models that are loaded already; of options' what is to be measured counts. A
    model with a native engine beside it is measured on that."""
    require_decoder(reference)
    prompts = greedy_prompts(options)
    scores = compare(
        reference, model, cut, lambda done, total: progress("comparing logits", done, total)
    )
    floor = noise_floor(
        reference,
        cut[: options.floor_windows],
        progress=lambda done, total: progress("noise floor", done, total),
    )
    greedy = greedy_agreement(
        reference,
        model,
        tokenizer,
        prompts,
        options.prompt_tokens,
        progress=lambda done, total: progress("greedy prompts", done, total),
    )
    native = model.weightpath.native
    return Verification(
        text=description,
        compute=str(reference.dtype).removeprefix("torch."),
        activation_bits=model.weightpath.activation_bits,
        fidelity=summarize(scores),
        noise_floor=summarize(floor),
        greedy=greedy,
        notes=model.weightpath.notes,
        engine="transformers" if native is None else "native",
        kv_cache=None if native is None else native.cache,
    )


def require_decoder(model: Any) -> None:
    """BadRequest for a model without next-token logits, which is what is compared."""
    if not model.can_generate():
        raise BadRequest(
            f"{type(model).__name__} predicts no next token, which is what is compared; take a "
            "decoder, or compare an encoder's outputs yourself (weightpath.load)"
        )


def greedy_prompts(options: VerifyOptions) -> list[Prompt]:
    """The prompts of the greedy comparison. BadRequest for a bad file, or fewer than it needs."""
    prompts = read_prompts(options.prompts)
    if len(prompts) < MINIMUM_PROMPTS:
        raise BadRequest(
            f"prompts {options.prompts}: {len(prompts)}; k of n needs at least {MINIMUM_PROMPTS}"
        )
    return prompts


def text_windows(tokenizer: Any, options: VerifyOptions) -> tuple[list[Window], str]:
    """The windows to measure on, and in words what they are. BadRequest for fewer than two, which
    give no interval."""
    documents, rule = read_documents(options.text) if options.text else default_documents()
    cut = windows(
        tokenizer, documents, options.length, options.limit, contiguous=options.contiguous
    )
    if min(len(cut), options.floor_windows) < 2:
        raise BadRequest(
            f"{rule}: {len(cut)} windows of {options.length} tokens, {options.floor_windows} for the "
            "noise floor; an interval needs 2 of each, so allow more windows or give a longer text"
        )
    shape = "in a row" if options.contiguous else "within documents"
    return cut, f"{rule}; {len(cut)} windows of up to {options.length} tokens {shape}"


def compute_dtype(checkpoint: Checkpoint, wanted: str | None) -> torch.dtype:
    """fp32 leaves only the weights' rounding in the comparison; bf16 where memory is short."""
    if wanted is not None:
        if wanted not in ("float32", "bfloat16"):
            raise BadRequest(f"compute '{wanted}': use float32 or bfloat16")
        return getattr(torch, wanted)
    weights = sum(info.nbytes // info.dtype.itemsize for info in checkpoint.tensors.values())
    available = probe().ram_available
    return torch.float32 if not available or 8 * weights < available / 2 else torch.bfloat16


def tokenizer_folder(reference: str, folder: Path) -> Path:
    """Where the tokenizer is: the low-bit folder carries it; else the reference's own."""
    if (folder / "tokenizer_config.json").is_file() or (folder / "tokenizer.json").is_file():
        return folder
    return locate(reference)
