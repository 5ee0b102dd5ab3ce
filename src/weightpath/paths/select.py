"""Which weight path a device should run, with every reason and every rejection.

The decision table, first path that fits and that the runtime loads:

    device                speed                                  fidelity
    x86 CPU               w4a8-amx, w4a8-vnni, w4a8-avx2,        w4a16-tinygemm, w8a16, floats
                          w4a16-tinygemm, w8a16, floats
    Arm CPU               w4a16-tinygemm, w8a16, floats          the same
    CUDA, Jetson          w4a16-cuda, floats                     w8a16-cuda, floats
    phone NPU             export-qnn-w8a16                       the same
    another CPU           w8a16, floats                          the same

Floats: bf16, else fp16, else fp32. From the edge selector this project took over, with the GPU
rows and the VNNI and AVX2 rows that it left open. Evidence never changes the choice: where it
speaks against it, the reasons say so, and the user decides.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from weightpath.device.profile import HardwareProfile, device_class, hardware_class
from weightpath.errors import BadRequest
from weightpath.paths.catalog import CATALOG, WeightPath, find_path
from weightpath.paths.evidence import Evidence, Record, load_records
from weightpath.paths.runtimes import find_runtime, loads
from weightpath.paths.tensors import ModelShapes, TensorPlan, plan_tensors

PRIORITIES = ("speed", "fidelity")

_FLOATS = ("bf16", "fp16", "fp32")
_ARM = ("w4a16-tinygemm", "w8a16", *_FLOATS)
_OTHER = ("w8a16", *_FLOATS)
_CUDA_SPEED = ("w4a16-cuda", *_FLOATS)
_CUDA_FIDELITY = ("w8a16-cuda", *_FLOATS)
_PHONE = ("export-qnn-w8a16",)

PREFERENCES: dict[tuple[str, str], tuple[str, ...]] = {
    ("x86_cpu", "speed"): ("w4a8-amx", "w4a8-vnni", "w4a8-avx2", *_ARM),
    ("x86_cpu", "fidelity"): _ARM,
    ("arm64_cpu", "speed"): _ARM,
    ("arm64_cpu", "fidelity"): _ARM,
    ("cuda_discrete", "speed"): _CUDA_SPEED,
    ("cuda_discrete", "fidelity"): _CUDA_FIDELITY,
    ("jetson", "speed"): _CUDA_SPEED,
    ("jetson", "fidelity"): _CUDA_FIDELITY,
    ("npu_phone", "speed"): _PHONE,
    ("npu_phone", "fidelity"): _PHONE,
    ("other_cpu", "speed"): _OTHER,
    ("other_cpu", "fidelity"): _OTHER,
}


@dataclass(frozen=True)
class Selection:
    """The chosen path as this device and runtime use it, and how it came to be chosen."""

    path: WeightPath
    priority: str
    runtime: str
    device_class: str
    reasons: tuple[str, ...]
    rejected: tuple[tuple[str, str], ...]  # (name, sentence), every other path in catalog order
    records: tuple[Record, ...] = ()  # evidence for the chosen path on this class of device
    verified: bool = False
    warnings: tuple[str, ...] = ()  # damaged files in the record stores

    @property
    def vllm_command(self) -> str | None:
        """The line that serves the built folder with vLLM; None where vLLM cannot run the path
        here. For one user on one machine there is `weightpath serve`."""
        return self.path.vllm_command("MODEL" if self.path.scheme is None else "DIR")

    def to_dict(self) -> dict[str, Any]:
        """The selection as JSON-ready values, with vLLM's arguments spelt out."""
        path = {
            item.name: getattr(self.path, item.name)
            for item in fields(WeightPath)
            if item.name != "requires"
        }
        path["scheme"] = None if self.path.scheme is None else self.path.scheme.name
        path["engine_kwargs"] = self.path.as_engine_kwargs()
        path["engine_environment"] = dict(self.path.engine_environment)
        path["vllm_command"] = self.vllm_command
        return {
            "path": path,
            "priority": self.priority,
            "runtime": self.runtime,
            "device_class": self.device_class,
            "verified": self.verified,
            "reasons": list(self.reasons),
            "rejected": [{"path": name, "reason": reason} for name, reason in self.rejected],
            "records": [record.to_dict() | {"source": record.source} for record in self.records],
            "warnings": list(self.warnings),
        }


def select_weight_path(
    profile: HardwareProfile,
    priority: str = "speed",
    runtime: str = "weightpath",
    model: ModelShapes | None = None,
    evidence: Evidence | None = None,
) -> Selection:
    """The weight path for a device.

    priority: "speed" or "fidelity". runtime: what will run it, which bounds the choice. model:
    its shapes, for the group size and the bytes. evidence: records; None reads the shipped and
    the user's own. Raises BadRequest for an unknown priority or runtime, and where the runtime
    loads no path on this device.
    """
    if priority not in PRIORITIES:
        raise BadRequest(f"priority '{priority}': unknown; use speed or fidelity")
    facts = find_runtime(runtime)
    store = load_records() if evidence is None else evidence
    obstacles = {path.name: _obstacle(path, runtime, profile) for path in CATALOG}
    order = PREFERENCES[hardware_class(profile), priority]
    name = next((name for name in order if obstacles[name] is None), None)
    if name is None:
        why = loads(runtime, None, "linear", profile) or obstacles[order[0]]
        raise BadRequest(
            f"no weight path for {device_class(profile)} with {runtime}: {why}; use another runtime"
        )
    path = _for_device(find_path(name), profile)
    reasons = [f"{priority} on {device_class(profile)}: {path.rationale}"]
    better = (find_path(earlier) for earlier in order[: order.index(name)])
    if refused := next((path for path in better if path.fits(profile) is None), None):
        reasons.append(f"{refused.name} would come first, but {obstacles[refused.name]}")
    if runtime == "weightpath":
        reasons.append(path.kernels)
    elif path.scheme is not None:
        reasons.append(facts.computes)
    if runtime == "vllm":
        reasons += [f"start vLLM with {key}={value}" for key, value in path.engine_environment]
    if model is not None:
        tensors = plan_tensors(model, path.scheme, runtime=runtime, profile=profile)
        if path.scheme is not None and tensors.group_size is not None:
            path = path.with_scheme(replace(path.scheme, group_size=tensors.group_size))
        reasons += _sizes(tensors, profile)
    records = store.of(name, device_class(profile), runtime)
    reasons += _spoken(records, name, profile, runtime)
    reasons += _rivals(store, records, obstacles, profile, runtime)
    rejected = tuple(
        (other.name, obstacles[other.name] or _why_not(other, path, priority))
        for other in CATALOG
        if other.name != name
    )
    return Selection(
        path=path,
        priority=priority,
        runtime=runtime,
        device_class=device_class(profile),
        reasons=tuple(reasons),
        rejected=rejected,
        records=records,
        verified=bool(records),
        warnings=store.warnings,
    )


def _obstacle(path: WeightPath, runtime: str, profile: HardwareProfile) -> str | None:
    """Why this device or this runtime cannot use a path, or None."""
    return path.fits(profile) or loads(runtime, path.scheme, "linear", profile)


def _for_device(path: WeightPath, profile: HardwareProfile) -> WeightPath:
    """The path with what depends on the device: whether vLLM runs it here, and in which dtype."""
    vllm = path.vllm and loads("vllm", path.scheme, "linear", profile) is None
    dtype = path.dtype
    on_cuda = hardware_class(profile) in ("cuda_discrete", "jetson")
    if path.scheme is not None and on_cuda and not profile.supports_bf16:
        dtype = "float16"  # vLLM 0.32.0 refuses bf16 below capability 8.0
    return replace(path, vllm=vllm, dtype=dtype)


def _sizes(tensors: TensorPlan, profile: HardwareProfile) -> list[str]:
    """What the model's weights take under the path, and whether they fit the device."""
    planned, before = tensors.file_bytes, tensors.source_bytes
    said = [
        tensors.group_reason,
        f"the file takes {planned / 1e6:.1f} MB of the model's {before / 1e6:.1f} MB; a decode "
        f"step reads {tensors.matmul_bits_per_weight:.2f} bits a weight, head included",
    ]
    on_gpu = hardware_class(profile) in ("cuda_discrete", "jetson")
    memory = profile.gpu_memory if on_gpu else profile.ram_total
    if memory and planned > memory:
        said.append(f"warning: that exceeds this device's memory of {memory / 1e6:.1f} MB")
    return said


def _spoken(
    records: tuple[Record, ...], name: str, profile: HardwareProfile, runtime: str
) -> list[str]:
    """One sentence a record, or that there is none."""
    where = device_class(profile)
    if not records:
        return [
            f"not verified: no record of {name} on {where} under {runtime}; published figures "
            "are claims"
        ]
    said = []
    for record in records:
        speed = record.decode
        if speed.verdict == "slower":
            opening = "warning: measured slower than bf16"
        elif speed.verdict == "level":
            opening = "measured no faster than bf16 beyond the spread"
        else:
            opening = "measured faster than bf16"
        loss = "" if record.kld is None else f", KLD {record.kld:.4f} nats"
        said.append(
            f"{opening} on {where}: decode {speed.ratio:.2f} times bf16 ({speed.ratio_low:.2f} "
            f"to {speed.ratio_high:.2f}), {record.model} {record.scheme}{loss}, {record.date}, "
            f"{record.source or 'a record not saved'}"
        )
    return said


def _rivals(
    store: Evidence,
    records: tuple[Record, ...],
    obstacles: dict[str, str | None],
    profile: HardwareProfile,
    runtime: str,
) -> list[str]:
    """Usable paths that measured faster than the chosen one on the same model, beyond spreads."""
    said = []
    for own in records:
        for path in CATALOG:
            if obstacles[path.name] is not None or path.name == own.path:
                continue
            for other in store.of(path.name, device_class(profile), runtime):
                if other.model == own.model and other.decode.ratio_low > own.decode.ratio_high:
                    said.append(
                        f"warning: {path.name} measured faster here on {own.model}: decode "
                        f"{other.decode.ratio:.2f} times bf16 against {own.decode.ratio:.2f}, "
                        f"{other.source or 'a record not saved'}"
                    )
    return said


def _why_not(path: WeightPath, chosen: WeightPath, priority: str) -> str:
    """Why a path that could run comes after the chosen one."""
    lead = f"it can run here, but {chosen.name} comes first for {priority}: "
    reads = f"reads {path.bits_per_weight:.2f} bits a weight, not {chosen.bits_per_weight:.2f}"
    if path.scheme is None and chosen.scheme is None:
        narrow = path.bits_per_weight <= chosen.bits_per_weight
        return lead + (f"it {path.rationale}" if narrow else "it takes twice the bytes")
    if path.scheme is None or chosen.scheme is None:
        return lead + f"it loses nothing, and {reads}"
    if path.scheme.bits < chosen.scheme.bits:
        return lead + f"{path.scheme.bits} bits lose more than {chosen.scheme.bits}"
    if path.scheme.bits > chosen.scheme.bits:
        return lead + f"it loses less, and {reads}"
    mine, theirs = path.scheme.activation_bits, chosen.scheme.activation_bits
    if mine < theirs:
        return lead + "int8 activations lose more than 16-bit ones"
    if mine > theirs:
        return lead + "16-bit activations cost more arithmetic than int8 ones"
    if path.name == "w8a16":
        return lead + "these are the same weights, without a kernel made for this device"
    return lead + "these are the same weights with fewer products a cycle"
