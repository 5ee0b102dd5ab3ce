"""Tensors by name and shape: missing, unexpected, doubled, misnamed, and what is carried whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from audit_cases import HEAD, TABLE, floats, info, kinds, modules, packed, the_one, wanted
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from weightpath.checkpoints.audit import Finding, audit_names
from weightpath.checkpoints.shards import TensorInfo
from weightpath.checkpoints.store import open_checkpoint

Q = "model.layers.0.self_attn.q_proj"
UP = "model.layers.1.mlp.up_proj"
TIED = (HEAD, TABLE)


def rename(tensors: dict[str, TensorInfo], old: str, new: str) -> dict[str, TensorInfo]:
    """Names that start with `old` start with `new` instead."""
    return {
        (new + name.removeprefix(old) if name.startswith(old) else name): value
        for name, value in tensors.items()
    }


# Sound checkpoints.


def test_a_sound_checkpoint_has_no_finding_known_or_not() -> None:
    assert audit_names(floats(), {}, wanted()) == ()
    assert audit_names(floats(), {}, None) == ()
    tensors, parts = packed()
    assert audit_names(tensors, parts, wanted(), shapes=modules()) == ()
    assert audit_names(tensors, parts, None, num_hidden_layers=2) == ()


def test_a_tied_head_that_is_not_stored_is_no_finding() -> None:
    assert audit_names(floats(head=False), {}, wanted(head=False), TIED) == ()
    assert audit_names(floats(head=False), {}, wanted(), TIED) == ()


# Missing and unexpected.


def test_a_missing_tensor_is_an_error_with_the_shape_that_is_wanted() -> None:
    tensors = floats()
    del tensors[f"{UP}.weight"]
    (finding,) = audit_names(tensors, {}, wanted())
    assert (finding.severity, finding.kind, finding.tensor) == ("error", "missing", f"{UP}.weight")
    assert "(256, 128)" in finding.problem


def test_a_missing_linear_of_a_packed_checkpoint_is_missing_as_its_weight() -> None:
    tensors, parts = packed()
    for name in parts.pop(UP).values():
        del tensors[name]
    (finding,) = audit_names(tensors, parts, wanted())
    assert (finding.kind, finding.tensor) == ("missing", f"{UP}.weight")


def test_an_untied_head_that_is_not_stored_is_missing() -> None:
    (finding,) = audit_names(floats(head=False), {}, wanted())
    assert (finding.kind, finding.tensor) == ("missing", HEAD)


def test_a_tensor_without_a_place_is_unexpected_packed_or_not() -> None:
    tensors, parts = packed()
    tensors["model.odd.weight"] = info("model.odd.weight", (4, 4))
    parts["model.extra"] = {}
    for suffix in ("qweight", "qzeros", "scales"):
        name = parts["model.extra"][suffix] = f"model.extra.{suffix}"
        tensors[name] = info(name, (8, 8), torch.int32)
    found = audit_names(tensors, parts, wanted())
    assert kinds(found) == [("warning", "unexpected")] * 2
    assert {finding.tensor for finding in found} == {"model.odd.weight", "model.extra"}


@pytest.mark.parametrize(
    ("shape", "dtype", "told"),
    [
        ((128, 64), torch.bfloat16, "has shape (128, 64), the model wants (128, 128)"),
        ((128, 128), torch.int32, "is torch.int32 and part of no packed linear"),
    ],
)
def test_a_wrong_shape_or_dtype_is_an_error(
    shape: tuple[int, ...], dtype: torch.dtype, told: str
) -> None:
    tensors = floats() | {f"{Q}.weight": info(f"{Q}.weight", shape, dtype)}
    (finding,) = audit_names(tensors, {}, wanted())
    assert (finding.severity, finding.kind) == ("error", "wrong dtype or shape")
    assert told in finding.problem


def test_a_packed_linear_of_another_shape_is_an_error() -> None:
    tensors, parts = packed()
    (finding,) = audit_names(tensors, parts, wanted(), shapes=modules() | {Q: (256, 128)})
    assert finding.tensor == Q
    assert "holds (256, 128), the model wants (128, 128)" in finding.problem


# Parts.


@pytest.mark.parametrize("lost", ["qweight", "scales", "qzeros"])
def test_a_linear_that_lost_a_part_is_told_with_the_part(lost: str) -> None:
    tensors, parts = packed()
    del tensors[parts[Q].pop(lost)]
    (finding,) = audit_names(tensors, parts, wanted())
    assert (finding.severity, finding.kind, finding.tensor) == ("error", "incomplete parts", Q)
    assert f"no {lost}" in finding.problem


def test_scales_whose_codes_are_nowhere_are_told_even_where_no_linear_claims_them() -> None:
    tensors, parts = packed()
    for suffix in ("qweight", "qzeros"):
        del tensors[parts[Q][suffix]]
    del parts[Q]
    found = audit_names(tensors, parts, wanted())
    assert ("error", "incomplete parts") in kinds(found)
    assert the_one(found, "incomplete parts").tensor == f"{Q}.scales"
    assert the_one(found, "missing").tensor == f"{Q}.weight"


def test_a_parameter_that_only_ends_like_a_part_is_the_model_s_own() -> None:
    tensors = floats() | {"model.mixer.scales": info("model.mixer.scales", (8,))}
    assert audit_names(tensors, {}, wanted() | {"model.mixer.scales": (8,)}) == ()
    assert kinds(audit_names(tensors, {}, wanted())) == [("error", "incomplete parts")]


@pytest.mark.parametrize(
    ("own", "told"),
    [
        (("weight_packed", "weight_shape"), "no weight_scale"),
        (("weight_scale", "weight_zero_point"), "no weight_packed"),
        (("W_q", "scale"), "no zero"),
        (("_weight_scale",), "no _weight_qdata"),
        (("weight", "weight.absmax"), "no weight.quant_map"),
        (("SCB",), "no weight"),
        (("qzeros", "scales"), "no qweight"),
    ],
)
def test_every_format_s_incomplete_parts_are_told(own: tuple[str, ...], told: str) -> None:
    tensors = floats()
    del tensors[f"{Q}.weight"]
    parts = {Q: {suffix: f"{Q}.{suffix}" for suffix in own}}
    tensors |= {name: info(name, (8, 8), torch.int32) for name in parts[Q].values()}
    finding = the_one(audit_names(tensors, parts, wanted()), "incomplete parts")
    assert told in finding.problem


@pytest.mark.parametrize(
    "own",
    [("weight", "weight_scale"), ("weight_packed", "weight_scale", "weight_shape"),
     ("W_q", "scale", "zero"), ("_weight_qdata", "_weight_scale"),
     ("weight", "weight.absmax", "weight.quant_map"), ("weight", "SCB")],
)  # fmt: skip
def test_whole_sets_of_parts_have_no_finding(own: tuple[str, ...]) -> None:
    tensors = floats()
    del tensors[f"{Q}.weight"]
    parts = {Q: {suffix: f"{Q}.{suffix}" for suffix in own}}
    tensors |= {name: info(name, (8, 8), torch.int32) for name in parts[Q].values()}
    assert audit_names(tensors, parts, wanted()) == ()


@pytest.mark.parametrize("claimed", [True, False])
def test_a_linear_stored_both_packed_and_as_floats_is_told_once(claimed: bool) -> None:
    tensors, parts = packed()
    tensors[f"{Q}.weight"] = info(f"{Q}.weight", (128, 128))
    if claimed:
        parts[Q]["weight"] = f"{Q}.weight"
    (finding,) = audit_names(tensors, parts, wanted())
    assert (finding.severity, finding.kind) == ("warning", "stored both packed and as floats")


# Prefixes.


@pytest.mark.parametrize(
    ("old", "new", "told", "mend"),
    [
        ("", "base_model.model.", "21 names start with 'base_model.model.'", "merge_and_unload"),
        ("", "module.", "21 names start with 'module.'", "model.module"),
        ("", "_orig_mod.", "21 names start with '_orig_mod.'", "model._orig_mod"),
        ("model.", "model._orig_mod.", "20 names start with 'model._orig_mod.'", "torch.compile"),
        ("model.", "model.model.", "20 names start with 'model.model.', the model wants 'model.'",
         "rename them"),
        ("model.", "language_model.model.", "20 names start with 'language_model.'",
         "rename them: model.embed_tokens.weight, not language_model.model.embed_tokens.weight"),
        ("model.", "transformer.", "20 names start with 'transformer.', the model wants 'model.'",
         "rename them"),
        ("model.", "", "20 names lack 'model.' before them", "rename them"),
    ],
)  # fmt: skip
def test_a_foreign_prefix_is_one_finding_with_the_mend(
    old: str, new: str, told: str, mend: str
) -> None:
    (finding,) = audit_names(rename(floats(), old, new), {}, wanted())
    assert finding.severity == "error"
    assert finding.kind.startswith("foreign prefix")
    assert told in finding.problem
    assert mend in finding.mend


def test_two_prefixes_are_found_in_turn() -> None:
    tensors = rename(floats(), "model.", "language_model.model.")
    tensors = rename(tensors, "lm_head.", "language_model.lm_head.")
    tensors = rename(tensors, "language_model.model.norm", "model.model.norm")
    found = audit_names(tensors, {}, wanted())
    assert [finding.problem.split(" name")[0] for finding in found] == ["20", "1"]
    assert all(finding.kind.startswith("foreign prefix") for finding in found)


def test_packed_linears_under_a_foreign_prefix_are_found_too() -> None:
    tensors, parts = packed()
    tensors = {f"module.{name}": value for name, value in tensors.items()}
    parts = {
        f"module.{module}": {suffix: f"module.{name}" for suffix, name in own.items()}
        for module, own in parts.items()
    }
    (finding,) = audit_names(tensors, parts, wanted())
    assert "21 names start with 'module.'" in finding.problem


def test_names_that_transformers_renames_on_load_are_no_finding() -> None:
    tensors = rename(floats(), "model.", "language_model.model.")
    found = audit_names(
        tensors, {}, wanted(), renamed=lambda name: name.removeprefix("language_model.")
    )
    assert found == ()


def test_a_weight_under_its_name_and_a_doubled_one_is_stored_twice() -> None:
    tensors = floats() | {f"model.{Q}.weight": info(f"model.{Q}.weight", (128, 128))}
    (finding,) = audit_names(tensors, {}, wanted())
    assert (finding.severity, finding.kind) == ("error", "stored twice")
    assert f"and {Q}.weight are one weight under two names" in finding.problem


def test_two_names_that_are_renamed_to_one_are_stored_twice() -> None:
    tensors = floats() | {"old.weight": info("old.weight", (128, 128))}
    found = audit_names(
        tensors, {}, wanted(), renamed=lambda n: f"{Q}.weight" if n == "old.weight" else n
    )
    assert the_one(found, "stored twice").tensor == "old.weight"


def test_a_tower_s_norm_is_not_taken_for_the_decoder_s_missing_one() -> None:
    tensors = floats() | {"visual.norm.weight": info("visual.norm.weight", (128,))}
    del tensors["model.norm.weight"]
    found = audit_names(tensors, {}, wanted())
    assert the_one(found, "missing").tensor == "model.norm.weight"
    assert not any(finding.kind.startswith("foreign prefix") for finding in found)


def test_a_prediction_layer_s_norm_is_not_taken_for_a_bare_model_s_missing_one() -> None:
    tensors = {"mtp.norm.weight": info("mtp.norm.weight", (8,))}
    found = audit_names(tensors, {}, {"norm.weight": (8,)})
    assert kinds(found) == [("error", "missing"), ("note", "extra prediction layers")]


def test_one_name_under_an_unlike_prefix_is_missing_and_unexpected() -> None:
    tensors = floats() | {"aux.norm.weight": info("aux.norm.weight", (128,))}
    del tensors["model.norm.weight"]
    assert kinds(audit_names(tensors, {}, wanted())) == [
        ("error", "missing"), ("warning", "unexpected"),
    ]  # fmt: skip


def test_a_name_under_a_prefix_with_another_shape_is_missing_and_unexpected() -> None:
    name = "module.model.norm.weight"
    tensors = floats() | {name: info(name, (64,))}
    del tensors["model.norm.weight"]
    assert kinds(audit_names(tensors, {}, wanted())) == [
        ("error", "missing"), ("warning", "unexpected"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("prefix", "kind"),
    [("module.", "module."), ("base_model.model.", "base_model.model."),
     ("_orig_mod.", "_orig_mod."), ("model.", "model.model.")],
)  # fmt: skip
def test_wrappers_are_known_by_name_alone_where_the_model_is_not(prefix: str, kind: str) -> None:
    old = "model." if prefix == "model." else ""
    found = audit_names(rename(floats(), old, prefix + old), {}, None)
    finding = the_one(found, f"foreign prefix {kind}")
    assert finding.severity == "warning"
    assert repr(kind) in finding.problem


# Biases.


def bias(values: list[float]) -> tuple[dict[str, TensorInfo], dict[str, Tensor]]:
    name = f"{Q}.bias"
    value = torch.zeros(128)
    value[: len(values)] = torch.tensor(values)
    return floats() | {name: info(name, (128,))}, {name: value}


def test_a_bias_that_the_architecture_lacks_is_a_warning_by_name_alone() -> None:
    (finding,) = audit_names(bias([])[0], {}, wanted())
    assert (finding.severity, finding.tensor) == ("warning", f"{Q}.bias")
    assert finding.kind == "biases that the architecture does not have"
    assert "not read" in finding.problem


@pytest.mark.parametrize(
    ("values", "severity", "told"),
    [([], "note", "all zeros"), ([0.0, 2.0, -1.0], "error", "2 of its values are not zero"),
     ([float("nan")], "error", "1 of its values")],
)  # fmt: skip
def test_such_a_bias_is_harmless_only_where_it_is_zero(
    values: list[float], severity: str, told: str
) -> None:
    tensors, data = bias(values)
    (finding,) = audit_names(tensors, {}, wanted(), read=data.__getitem__)
    assert finding.severity == severity
    assert told in finding.problem


def test_a_bias_that_the_architecture_has_must_be_there() -> None:
    tensors, data = bias([1.0])
    has = wanted() | {f"{Q}.bias": (128,)}
    assert audit_names(tensors, {}, has, read=data.__getitem__) == ()
    (finding,) = audit_names(floats(), {}, has)
    assert (finding.severity, finding.kind) == ("error", "missing biases")


# Heads.


@pytest.mark.parametrize("known", [True, False])
def test_a_tied_head_stored_as_an_equal_copy_is_a_note(known: bool) -> None:
    values = {HEAD: torch.ones(64, 128), TABLE: torch.ones(64, 128)}
    shapes = wanted(head=False) if known else None
    (finding,) = audit_names(floats(), {}, shapes, TIED, read=values.__getitem__)
    assert (finding.severity, finding.kind) == ("note", "tied head stored twice")
    assert "the two are equal" in finding.problem
    assert "16,384 bytes" in finding.problem


def test_a_tied_head_that_differs_is_a_warning_with_who_takes_which() -> None:
    values = {HEAD: torch.ones(64, 128), TABLE: torch.zeros(64, 128)}
    (finding,) = audit_names(floats(), {}, wanted(head=False), TIED, read=values.__getitem__)
    assert finding.severity == "warning"
    assert "vLLM takes the embedding" in finding.problem
    assert "tie_word_embeddings" in finding.mend


def test_a_tied_head_is_not_compared_by_headers_and_says_so() -> None:
    (finding,) = audit_names(floats(), {}, wanted(head=False), TIED)
    assert (finding.severity, "not compared" in finding.problem) == ("note", True)


def test_a_tied_head_of_another_shape_is_an_error() -> None:
    tensors = floats() | {HEAD: info(HEAD, (72, 128))}
    (finding,) = audit_names(tensors, {}, wanted(head=False), TIED)
    assert finding.severity == "error"
    assert "(72, 128) is tied to" in finding.problem


def test_a_tied_head_stored_as_a_quantized_triple_is_a_warning() -> None:
    tensors, parts = packed()
    del tensors[HEAD]
    parts["lm_head"] = {suffix: f"lm_head.{suffix}" for suffix in parts[Q]}
    tensors |= {name: info(name, (8, 8), torch.int32) for name in parts["lm_head"].values()}
    (finding,) = audit_names(tensors, parts, wanted(head=False), TIED)
    assert (finding.severity, finding.kind) == ("warning", "tied head stored twice")
    assert "packed" in finding.problem
    assert "sglang" in finding.problem
    assert audit_names(tensors, parts, wanted(), None) == ()


# What is carried whole.


@pytest.mark.parametrize(
    "name", ["mtp.fc.weight", "model.mtp_layers.0.proj.weight", "model.layers.2.eh_proj.weight"]
)
@pytest.mark.parametrize("known", [True, False])
def test_extra_prediction_layers_are_noted_with_their_bytes(name: str, known: bool) -> None:
    tensors = floats() | {name: info(name, (128, 256))}
    shapes = wanted() if known else None
    (finding,) = audit_names(tensors, {}, shapes, num_hidden_layers=2)
    assert (finding.severity, finding.kind) == ("note", "extra prediction layers")
    assert "1 weight, 0 of them packed, 65,536 bytes" in finding.problem
    assert finding.tensor == name


def test_vision_towers_are_noted_as_one_wanted_or_not() -> None:
    names = [f"visual.blocks.{i}.attn.qkv.weight" for i in range(3)]
    names.append("multi_modal_projector.linear_1.weight")
    tensors = floats() | {name: info(name, (8, 8)) for name in names}
    for shapes in (wanted(), wanted() | dict.fromkeys(names, (8, 8)), None):
        (finding,) = audit_names(tensors, {}, shapes)
        assert (finding.severity, finding.kind) == ("note", "vision and audio towers")
        assert "4 weights, 0 of them packed, 512 bytes" in finding.problem


@pytest.mark.parametrize("known", [True, False])
def test_stored_rotary_tables_are_noted(known: bool) -> None:
    names = [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(2)]
    tensors = floats() | {name: info(name, (16,), torch.float32) for name in names}
    (finding,) = audit_names(tensors, {}, wanted() if known else None)
    assert (finding.severity, finding.kind) == ("note", "rotary tables")
    assert "2 weights" in finding.problem


EXPERTS = ("gate_proj", "up_proj", "down_proj")


def one_by_one(count: int = 4, block: str = "model.layers.{}.mlp") -> dict[str, TensorInfo]:
    names = [
        f"{block.format(layer)}.experts.{number}.{leaf}.weight"
        for layer in range(2)
        for number in range(count)
        for leaf in EXPERTS
    ]
    return {name: info(name, (32, 128)) for name in names}


def fused(count: int = 4) -> dict[str, tuple[int, ...]]:
    return {
        f"model.layers.{layer}.mlp.experts.{leaf}": (count, *rest)
        for layer in range(2)
        for leaf, rest in (("gate_up_proj", (64, 128)), ("down_proj", (128, 32)))
    }


@pytest.mark.parametrize("form", ["2-D", "3-D", "unknown"])
def test_experts_one_by_one_are_counted_and_fill_fused_ones(form: str) -> None:
    stored = one_by_one()
    shapes = {"2-D": {n: i.shape for n, i in stored.items()}, "3-D": fused(), "unknown": None}[form]
    known = None if shapes is None else wanted() | shapes
    (finding,) = audit_names(floats() | stored, {}, known)
    assert (finding.severity, finding.kind) == ("note", "experts")
    assert "2 blocks of up to 4, 24 weights, 0 of them packed, 196,608 bytes" in finding.problem


def test_experts_under_another_block_s_name_fill_the_layer_s_fused_ones() -> None:
    stored = one_by_one(block="model.layers.{}.block_sparse_moe")
    assert kinds(audit_names(floats() | stored, {}, wanted() | fused())) == [("note", "experts")]


def test_packed_experts_are_counted_as_packed() -> None:
    tensors, parts = packed()
    for name in one_by_one():
        module = name.removesuffix(".weight")
        parts[module] = {suffix: f"{module}.{suffix}" for suffix in ("qweight", "qzeros", "scales")}
        tensors |= {n: info(n, (4, 4), torch.int32) for n in parts[module].values()}
    (finding,) = audit_names(tensors, parts, wanted() | fused())
    assert "24 weights, 24 of them packed" in finding.problem


def test_fused_experts_are_noted_with_their_share_of_the_bytes() -> None:
    stored = {name: info(name, shape) for name, shape in fused().items()}
    tensors = floats() | stored
    (finding,) = audit_names(tensors, {}, wanted() | fused())
    assert (finding.severity, finding.kind) == ("note", "fused experts")
    nbytes = sum(i.nbytes for i in stored.values())
    share = 100 * nbytes / sum(i.nbytes for i in tensors.values())
    assert f"4 tensors, 0 of them packed, {nbytes:,} bytes, {share:.0f}%" in finding.problem
    assert "float dtype" in finding.mend


def test_fused_experts_in_the_file_fill_experts_one_by_one() -> None:
    stored = {name: info(name, shape) for name, shape in fused().items()}
    shapes = wanted() | {name: i.shape for name, i in one_by_one().items()}
    assert kinds(audit_names(floats() | stored, {}, shapes)) == [("note", "fused experts")]


def test_a_fused_expert_tensor_that_is_packed_is_noted_as_packed() -> None:
    tensors, parts = packed()
    module = "model.layers.0.mlp.experts.gate_up_proj"
    parts[module] = {suffix: f"{module}.{suffix}" for suffix in ("weight_packed", "weight_scale")}
    tensors |= {name: info(name, (4, 64, 16), torch.int32) for name in parts[module].values()}
    finding = the_one(audit_names(tensors, parts, None), "fused experts")
    assert "1 tensor, 1 of them packed" in finding.problem


@pytest.mark.parametrize("known", [True, False])
def test_an_expert_left_out_is_an_error(known: bool) -> None:
    stored = {n: i for n, i in one_by_one().items() if "layers.1.mlp.experts.2." not in n}
    shapes = wanted() | fused() if known else None
    found = audit_names(floats() | stored, {}, shapes)
    finding = the_one(found, "missing experts")
    assert (finding.severity, finding.tensor) == ("error", "model.layers.1.mlp.experts")
    assert "1 of 4 experts are missing (2)" in finding.problem


def test_a_tensor_of_one_expert_left_out_is_told_once() -> None:
    stored = one_by_one()
    del stored["model.layers.1.mlp.experts.2.up_proj.weight"]
    shapes = wanted() | {name: i.shape for name, i in one_by_one().items()}
    finding = the_one(audit_names(floats() | stored, {}, shapes), "missing")
    assert finding.tensor == "model.layers.1.mlp.experts.2.up_proj.weight"


def test_an_expert_of_another_shape_is_an_error() -> None:
    stored = one_by_one()
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    stored[name] = info(name, (16, 128))
    finding = the_one(audit_names(floats() | stored, {}, None), "wrong dtype or shape")
    assert "has shape (16, 128), other experts of the block (32, 128)" in finding.problem


def test_another_number_of_experts_than_the_model_has_is_an_error() -> None:
    found = audit_names(floats() | one_by_one(4), {}, wanted() | fused(8))
    assert [f.problem for f in found if f.severity == "error"] == [
        "4 experts are stored, the model has 8"
    ] * 2


# Names alone.


def test_a_layer_left_out_is_told_where_the_model_is_not_known() -> None:
    tensors = {n: i for n, i in floats(4).items() if not n.startswith("model.layers.2.")}
    (finding,) = audit_names(tensors, {}, None)
    assert (finding.severity, finding.kind) == ("warning", "missing layers")
    assert "1 of 4 layers are missing, the first is 2" in finding.problem


def test_a_few_layers_of_many_are_no_list_with_gaps() -> None:
    tensors = {n: i for n, i in floats(12).items() if ".layers.11." in n or ".layers." not in n}
    assert audit_names(tensors, {}, None) == ()


def test_a_layer_that_lacks_what_the_others_have_is_told_where_the_model_is_not_known() -> None:
    tensors = floats(4)
    del tensors["model.layers.3.mlp.up_proj.weight"]
    (finding,) = audit_names(tensors, {}, None)
    assert (finding.severity, finding.tensor) == ("warning", "model.layers.3.mlp.up_proj.weight")


def test_lists_of_plain_layers_may_lack_numbers() -> None:
    names = ["mm.proj.0.weight", "mm.proj.2.weight", "mm.proj.4.weight"]
    tensors = floats() | {name: info(name, (4, 4)) for name in names}
    assert audit_names(tensors, {}, None) == ()


# Hostile names, real files, real models.


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_no_names_make_the_audit_raise_and_lost_ones_are_always_told(data: st.DataObject) -> None:
    piece = st.sampled_from(
        ["model", "layers", "0", "1", "99999999999", "experts", "weight", "scales", "", "mtp",
         "visual", "q_proj", "bias", "\n", "model.model", "module"]
    )  # fmt: skip
    odd = data.draw(st.lists(st.lists(piece, max_size=6).map(".".join), max_size=12))
    size = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    tensors, parts = packed()
    tensors |= {name: info(name, data.draw(size)) for name in odd if name not in tensors}
    lost = data.draw(st.sampled_from(sorted(floats())))
    for name in parts.pop(lost.removesuffix(".weight"), {"": lost}).values():
        tensors.pop(name, None)
    known = data.draw(st.booleans())
    found = audit_names(tensors, parts, wanted() if known else None, num_hidden_layers=2)
    assert all(finding.line.isprintable() for finding in found)
    told = any(f.kind == "missing" or f.kind.startswith("foreign prefix") for f in found)
    assert told or not known or lost in tensors or any(n.endswith(lost) for n in odd)


def test_ten_thousand_lost_names_are_audited_in_a_moment() -> None:
    shapes = {f"model.layers.{i}.mlp.up_proj.weight": (8, 8) for i in range(10_000)}
    tensors = {f"x.{name}": info(f"x.{name}", (8, 8)) for name in shapes}
    (finding,) = audit_names(tensors, {}, shapes)
    assert "10000 names start with 'x.'" in finding.problem


def test_a_real_folder_with_a_lost_tensor_an_odd_one_and_a_bias_is_told(tmp_path: Path) -> None:
    values = {name: torch.zeros(shape) for name, shape in wanted().items()}
    del values[f"{UP}.weight"]
    values[f"{Q}.bias"] = torch.ones(128)
    values["odd.weight"] = torch.zeros(2, 2)
    save_file(values, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    checkpoint = open_checkpoint(tmp_path)
    found = audit_names(checkpoint.tensors, {}, wanted(), read=checkpoint.read)
    assert {(f.severity, f.kind, f.tensor) for f in found} == {
        ("error", "missing", f"{UP}.weight"),
        ("error", "biases that the architecture does not have", f"{Q}.bias"),
        ("warning", "unexpected", "odd.weight"),
    }


def config_of(kind: str) -> dict[str, object]:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 64,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}  # fmt: skip
    moe = {"num_experts": 4, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    return {"model_type": kind, **sizes, **(moe if kind == "qwen3_moe" else {})}


def shapes_of(kind: str) -> dict[str, tuple[int, ...]]:
    from weightpath.engine import skeleton

    model = skeleton.build(config_of(kind), torch.bfloat16)
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def test_the_names_here_are_those_of_transformers_llama() -> None:
    assert shapes_of("llama") == wanted()


def test_experts_one_by_one_fill_transformers_own_fused_ones() -> None:
    shapes = shapes_of("qwen3_moe")
    stored = {n: info(n, s) for n, s in shapes.items() if ".experts." not in n} | one_by_one()
    found: tuple[Finding, ...] = audit_names(stored, {}, shapes)
    assert kinds(found) == [("note", "experts")]
    del stored["model.layers.1.mlp.gate.weight"]
    assert ("error", "missing") in kinds(audit_names(stored, {}, shapes))
