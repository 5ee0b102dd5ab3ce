"""One opener for every format: the tensors of its linears, and how each is read.

    opener(source) -> Opened, or None where the source is not of this format

Each asks the format's own `recognise` first. Formats whose scheme is not known from headers and
zero points alone are outlined by reading the linear.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from weightpath.checkpoints import (
    autoround,
    awq,
    bitsandbytes,
    compressed_tensors,
    compressed_tensors_read,
    gptq,
    hqq,
    modelopt,
    torchao,
)
from weightpath.checkpoints.opened import Opened, Outline, Parts, Source, group_parts, outline_of
from weightpath.checkpoints.read_linear import ReadLinear
from weightpath.errors import BadCheckpoint, BadTensor, WeightpathError
from weightpath.scheme import Scheme

Read = Callable[[str], ReadLinear]
_CONFIG = "the config is another checkpoint's: fetch it again"


def open_autoround(source: Source) -> Opened | None:
    """AutoRound: GPTQ's, AWQ's or compressed-tensors' tensors, by its packing_format."""
    if source.settings.get("quant_method") not in autoround.METHODS:
        return None
    how = f"quant_method {source.settings['quant_method']} in {source.where}"
    stated = autoround.settings(source.settings, source.where)
    if stated.layout == "awq":

        def awq_settings(module: str) -> awq.AwqSettings:
            layer = stated.for_module(module)
            if layer is None:
                raise _ignored(source, module)
            return awq.settings(
                {"bits": layer.bits, "group_size": layer.group_size, "zero_point": not layer.sym},
                source.where,
            )  # fmt: skip

        opened = _open_awq(source, awq_settings, how)
    elif stated.layout == "compressed-tensors":
        parts = _packed_parts(source)
        opened = _open_compressed(source, parts, stated.scheme, how)
    else:
        opened = _open_gptq(source, stated.gptq, how)
    name = f"AutoRound ({stated.layout})"
    return replace(opened, format=name, notes=(*stated.notes, *opened.notes))


def open_awq(source: Source) -> Opened | None:
    """AWQ: gemm, gemv, gemv_fast and llm-awq, told apart by each linear's dtypes and shapes."""
    how = awq.recognise(source.settings, source.names)
    if how is None:
        return None
    stated = awq.settings(source.settings, source.where)
    return _open_awq(source, lambda _: stated, f"{how} in {source.where}")


def open_gptq(source: Source) -> Opened | None:
    """GPTQ v1 and v2, the convention decided by the stored zeros."""
    settings = source.settings
    method = settings.get("quant_method") or settings.get("method")
    parts = group_parts(source.names, gptq.SUFFIXES, ("qweight", "qzeros"))
    if str(method).lower() not in gptq.METHODS and not (
        method is None and parts and {"bits", "group_size"} <= settings.keys()
    ):
        return None
    how = f"quant_method {method}" if method else "the keys bits and group_size beside qweight"
    stated = gptq.settings(settings, source.where)
    opened = _open_gptq(source, stated.for_module, f"{how} in {source.where}")
    notes = [*stated.notes]
    other = source.side_files.get("quantize_config.json")
    if other is not None and other is not settings:
        second = gptq.settings({"quant_method": gptq.METHOD, **other}, "quantize_config.json")
        notes.extend(gptq.disagreements(stated, second))
    return replace(opened, notes=(*notes, *opened.notes))


def open_torchao(source: Source) -> Opened | None:
    """torchao tensor subclasses, described by the files' metadata."""
    how = torchao.recognise(source.settings, source.metadata)
    if how is None:
        return None
    stated = torchao.read_metadata(source.metadata, source.checkpoint.where)
    parts, kinds = Parts(), {}
    for name, tensor in stated.items():
        module = name.removesuffix(f".{tensor.parameter}")
        kinds[module] = tensor
        wanted = {tensor.suffix(part): f"{module}.{tensor.suffix(part)}" for part in tensor.parts}
        parts[module] = {
            suffix: full for suffix, full in wanted.items() if full in source.checkpoint.tensors
        }

    def read(module: str) -> ReadLinear:
        return torchao.from_tensors(module, kinds[module], source.tensors(parts[module]))

    return _by_reading("torchao", f"{how} in {source.checkpoint.where}", parts, read)


def open_modelopt(source: Source) -> Opened | None:
    """ModelOpt's INT4 AWQ and int8; its own hf_quant_config.json wins over config.json."""
    side = source.side_files.get("hf_quant_config.json")
    settings, where = source.settings, source.where
    if side is not None and modelopt.recognise(side) is not None:
        settings, where = side, "hf_quant_config.json"
    how = modelopt.recognise(settings)
    if how is None:
        return None
    stated = modelopt.settings(settings, where)
    found = group_parts(source.names, (*modelopt.SUFFIXES, "weight_scale_2"), ("weight_scale",))
    parts = {module: own for module, own in found.items() if stated.for_module(module) is not None}

    def read(module: str) -> ReadLinear:
        layer = stated.for_module(module)
        assert layer is not None
        return modelopt.from_tensors(module, layer, source.tensors(parts[module]))

    return _by_reading("ModelOpt", f"{how} in {where}", parts, read)


def open_compressed(source: Source) -> Opened | None:
    """compressed-tensors pack-quantized and int-quantized."""
    settings = source.settings
    if settings.get("quant_method") != compressed_tensors.METHOD and not (
        settings.get("quant_method") is None and "config_groups" in settings
    ):
        return None
    find = compressed_tensors.scheme_finder(settings, source.where)
    how = f"quant_method {compressed_tensors.METHOD} in {source.where}"
    return _open_compressed(source, _packed_parts(source), find, how)


def open_bitsandbytes(source: Source) -> Opened | None:
    """bitsandbytes int8, and nf4 and fp4 as floats."""
    how = bitsandbytes.recognise(source.settings, source.names)
    if how is None:
        return None
    parts = Parts()
    for name in source.names:
        found = bitsandbytes.part_of(name)
        if found is not None:
            parts.setdefault(found[0], {})[found[1]] = name
    parts = {module: own for module, own in parts.items() if own.keys() - {"weight"}}

    def read(module: str) -> ReadLinear:
        return bitsandbytes.from_tensors(module, source.tensors(parts[module]))

    return _by_reading("bitsandbytes", how, parts, read)


def open_hqq(source: Source) -> Opened | None:
    """HQQ, integers where its groups lie along K, else floats."""
    how = hqq.recognise(source.settings, source.names)
    if how is None:
        return None
    parts = group_parts(source.names, hqq.SUFFIXES, ("W_q",))

    def read(module: str) -> ReadLinear:
        return hqq.from_tensors(module, source.tensors(parts[module]))

    return _by_reading("HQQ", how, parts, read)


def _by_reading(format_name: str, how: str, parts: Parts, read: Read) -> Opened:
    return Opened(format_name, how, parts, lambda m: outline_of(m, read(m)), read)


def _ignored(source: Source, module: str) -> BadCheckpoint:
    return BadCheckpoint(
        source.where, f"{module} is packed but its config leaves it float", _CONFIG
    )


def _open_awq(source: Source, stated: Callable[[str], awq.AwqSettings], how: str) -> Opened:
    parts = group_parts(source.names, awq.SUFFIXES, ("qweight", "qzeros", "scaled_zeros"))

    def read(module: str) -> ReadLinear:
        found = awq.from_tensors(module, stated(module), source.tensors(parts[module]))
        return ReadLinear(found.qweight, notes=found.notes)

    def outline(module: str) -> Outline:
        settings = stated(module)
        infos = {suffix: source.info(name) for suffix, name in parts[module].items()}
        layout = awq.layout_of(module, settings, infos)
        if layout.version not in (awq.GEMM, awq.GEMV) or not settings.zero_point:
            return outline_of(module, read(module))
        scheme = Scheme(4, settings.group_size, symmetric=False)
        shape = (layout.out_features, layout.in_features)
        return Outline(scheme, shape, infos["scales"].dtype)

    version = awq.GEMM
    notes: tuple[str, ...] = ()
    for module in parts:
        try:
            infos = {suffix: source.info(name) for suffix, name in parts[module].items()}
            layout = awq.layout_of(module, stated(module), infos)
        except WeightpathError:
            continue  # said where the linear is outlined
        version, notes = layout.version, layout.notes
        break
    return Opened(f"AWQ {version}", how, parts, outline, read, notes)


def _open_gptq(
    source: Source, settings_of: Callable[[str], gptq.GptqSettings | None], how: str
) -> Opened:
    parts = group_parts(source.names, gptq.SUFFIXES, ("qweight", "qzeros"))
    stated: dict[str, gptq.GptqSettings] = {}
    counts: dict[str, gptq.ZeroCounts] = {}
    for module, own in parts.items():
        settings = settings_of(module)
        if settings is None:
            raise _ignored(source, module)
        stated[module] = settings
        if "qzeros" in own and "scales" in own:
            n = (*source.info(own["scales"]).shape, 0, 0)[1]
            counts[module] = gptq.count_zeros(
                source.checkpoint.read(own["qzeros"]), settings, n, own["qzeros"]
            )
    conventions = _conventions(source, parts, stated, counts)

    def read(module: str) -> ReadLinear:
        settings = stated[module]
        found = conventions[settings.bits].convention
        return ReadLinear(gptq.from_tensors(module, settings, source.tensors(parts[module]), found))

    def outline(module: str) -> Outline:
        settings, tensors = stated[module], source.tensors(parts[module])
        n, k, _ = gptq.layout_of(module, settings, tensors)
        if not gptq.in_column_order(settings, k, tensors.get("g_idx")):
            return outline_of(module, read(module))
        found, count = conventions[settings.bits].convention, counts[module]
        same = count.below if found == "v1" and not settings.planar else count.middle
        scheme = Scheme(settings.bits, settings.group_size, same == count.fields)
        return Outline(scheme, (n, k), tensors["scales"].dtype)

    notes = []
    for bits, found in conventions.items():
        notes.append(f"{bits}-bit zero points are read as {found.convention}: {found.how}")
        if found.contradiction:
            notes.append(f"contradiction: {found.contradiction}")
    kinds = sorted({found.convention for found in conventions.values()})
    return Opened(f"GPTQ {' and '.join(kinds) or 'v1'}", how, parts, outline, read, tuple(notes))


def _conventions(
    source: Source,
    parts: Parts,
    stated: dict[str, gptq.GptqSettings],
    counts: dict[str, gptq.ZeroCounts],
) -> dict[int, gptq.ZeroConvention]:
    """The zero convention of every width of codes; the codes' mean is asked only where needed."""
    found: dict[int, gptq.ZeroConvention] = {}
    for bits in sorted({settings.bits for settings in stated.values()}):
        modules = [module for module, settings in stated.items() if settings.bits == bits]
        samples = [counts[module] for module in modules if module in counts]
        settings, offset = stated[modules[0]], None
        uniform = all(c.fields in (c.below, c.middle) for c in samples)
        if settings.checkpoint_format is None and not uniform:
            offsets = [
                gptq.code_offset(module, stated[module], source.tensors(parts[module]))
                for module in modules
                if module in counts
            ]
            offset = sum(offsets) / len(offsets)
        found[bits] = gptq.zero_convention(samples, bits, settings, offset)
    return found


def _packed_parts(source: Source) -> Parts:
    """Linears in packed words, or of int8 weights beside a scale, and what belongs to each."""
    suffixes = (*compressed_tensors.SUFFIXES, "weight", *compressed_tensors.RUN_TIME_SUFFIXES)
    found = group_parts(source.names, suffixes, ("weight_packed", "weight_scale"))
    return {
        module: own
        for module, own in found.items()
        if "weight" not in own or source.info(own["weight"]).dtype == torch.int8
        or "weight_packed" in own
    }  # fmt: skip


def _open_compressed(
    source: Source, parts: Parts, find: Callable[[str], Scheme | None], how: str
) -> Opened:
    packed = any("weight_packed" in own for own in parts.values())

    def scheme_of(module: str) -> Scheme:
        scheme = find(module)
        if scheme is None:
            raise _ignored(source, module)
        return scheme

    def tensors_of(module: str) -> dict[str, torch.Tensor]:
        own = parts[module]
        if "weight" in own and "weight_packed" in own:
            raise BadTensor(own["weight"], "is stored both packed and as it was", _CONFIG)
        return source.tensors(own)

    def read(module: str) -> ReadLinear:
        scheme, tensors = scheme_of(module), tensors_of(module)
        return ReadLinear(compressed_tensors.from_tensors(module, scheme, tensors))

    def outline(module: str) -> Outline:
        scheme, tensors = scheme_of(module), tensors_of(module)
        order = tensors.get("weight_g_idx")
        if order is not None and not bool((order < 0).any()):
            return outline_of(module, read(module))
        shape = compressed_tensors_read.shape_of(module, scheme, tensors)
        return Outline(scheme, shape, tensors["weight_scale"].dtype)

    for module in parts:
        scheme_of(module)
    asked = sorted({suffix for own in parts.values() for suffix in own}
                   & set(compressed_tensors.RUN_TIME_SUFFIXES))  # fmt: skip
    notes = (f"{', '.join(asked)} are for quantized activations; only weights are read",)
    form = compressed_tensors.FORMAT if packed else compressed_tensors.INT_FORMATS[0]
    name = f"{compressed_tensors.METHOD} {form}"
    return Opened(name, how, parts, outline, read, notes if asked else ())
