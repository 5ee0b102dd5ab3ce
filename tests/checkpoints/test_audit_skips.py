"""Skip lists read the way each runtime reads them, and fused layers that they split."""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any

import pytest
from audit_cases import kinds, modules, the_one
from hypothesis import given, settings
from hypothesis import strategies as st

from weightpath.checkpoints.audit import audit_fused, fused_layers
from weightpath.checkpoints.audit_readings import readings_of

CT_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
Q0 = "model.layers.0.self_attn.q_proj"


def linears(*floats: str, layers: int = 2, head: bool = False) -> dict[str, bool]:
    """Every linear, quantized but for those whose name matches one of `floats`."""
    names = [*modules(layers), "lm_head"]
    packed = {name: not any(re.search(pattern, name) for pattern in floats) for name in names}
    return packed | {"lm_head": head}


def awq(*skip: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True,
            "version": "gemm", "modules_to_not_convert": list(skip) or None, **more}  # fmt: skip


def compressed(*ignore: str, targets: tuple[str, ...] = ("Linear",)) -> dict[str, Any]:
    groups = {"group_0": {"targets": list(targets), "weights": CT_WEIGHTS}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": groups, "ignore": list(ignore)}  # fmt: skip


def gptq(dynamic: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True,
            "dynamic": dynamic, **more}  # fmt: skip


# Sound ones.


@pytest.mark.parametrize(
    ("quantized", "config"),
    [
        (linears(), {}),
        (linears(), awq()),
        (linears("layers.1.mlp"), awq("model.layers.1.mlp")),
        (linears("mlp.down_proj"), awq("mlp.down_proj", "lm_head")),
        (linears(head=True), awq(lm_head=True) | {"modules_to_not_convert": None}),
        (linears(), compressed("lm_head")),
        (linears("layers.1.mlp"), compressed("lm_head", "re:model.layers.1.mlp.*")),
        (linears(head=True), compressed(targets=("Linear", "lm_head"))),
        (linears(), gptq()),
        (linears("down_proj"), gptq({r"-:.*\.down_proj": {}})),
        (linears(), {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True,
                     "packing_format": "auto_round:auto_gptq"}),
        (linears(), {"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["lm_head"]}),
        (linears(), {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 32,
                     "exclude_modules": ["lm_head"]}),
    ],
)  # fmt: skip
def test_lists_that_agree_with_the_tensors_have_no_finding(
    quantized: dict[str, bool], config: dict[str, Any]
) -> None:
    if config.get("lm_head"):  # transformers leaves every head float, and says so
        found = audit_fused(quantized, config)
        assert [f.tensor for f in found] == ["lm_head"]
        return
    assert [finding.line for finding in audit_fused(quantized, config)] == []


# Split layers.


@pytest.mark.parametrize("config", [compressed("lm_head", Q0), awq(Q0), gptq({f"-:{Q0}": {}}), {}])
def test_a_fused_layer_on_both_sides_is_what_vllm_refuses(config: dict[str, Any]) -> None:
    finding = the_one(audit_fused(linears("0.self_attn.q_proj"), config),
                      "fused layers split by the skip list")  # fmt: skip
    assert finding.severity == "warning"
    assert finding.tensor == "model.layers.0.self_attn.qkv_proj"
    assert "q_proj of it is float, k_proj, v_proj are quantized" in finding.problem
    assert "vLLM" in finding.problem


@pytest.mark.parametrize(
    ("shards", "fused"),
    [(("gate_proj", "up_proj"), "gate_up_proj"),
     (("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj"),
     (("in_proj_qkv", "in_proj_z"), "in_proj_qkvz"), (("in_proj_b", "in_proj_a"), "in_proj_ba")],
)  # fmt: skip
def test_every_layer_that_vllm_fuses_is_looked_at(shards: tuple[str, str], fused: str) -> None:
    both = {f"m.{shards[0]}": True, f"m.{shards[1]}": False}
    assert [f.tensor for f in audit_fused(both, {})] == [f"m.{fused}"]
    assert audit_fused(dict.fromkeys(both, True), {}) == ()
    assert audit_fused({f"m.{shards[0]}": True, f"n.{shards[1]}": False}, {}) == ()


def test_experts_of_a_block_are_one_layer() -> None:
    both = {
        f"m.mlp.experts.{i}.{leaf}": i != 3 for i in range(8) for leaf in ("up_proj", "down_proj")
    }
    (finding,) = audit_fused(both, {})
    assert finding.tensor == "m.mlp.experts"
    assert "3.up_proj, 3.down_proj of it are float, 0.up_proj, 0.down_proj, ... (14)" in (
        finding.problem
    )
    assert fused_layers(both) == {"m.mlp.experts": tuple(both)}
    assert fused_layers(["m.q_proj", "m.o_proj", "n.k_proj"]) == {}


# AWQ.


def test_a_short_entry_skips_layers_10_to_19_in_vllm_and_one_with_a_dot_in_transformers() -> None:
    quantized = linears(r"layers\.1\.", layers=20)
    (finding,) = audit_fused(quantized, awq("model.layers.1"))
    assert finding.kind == "skip entries that vLLM reads as covering quantized linears"
    assert "vLLM takes 70 quantized linears for float" in finding.problem
    assert finding.tensor == "model.layers.10.self_attn.q_proj"
    (finding,) = audit_fused(quantized, awq("model.layers.1."))  # here a dot is any sign
    assert finding.kind == "skip entries that transformers reads as covering quantized linears"
    assert "70 quantized linears" in finding.problem
    assert audit_fused(quantized, awq("model.layers.1.mlp", "model.layers.1.self_attn")) == ()


def test_an_entry_for_the_router_skips_gate_proj_in_vllm_alone() -> None:
    quantized = {"m.0.mlp.gate": False, "m.0.mlp.gate_proj": True, "m.0.mlp.up_proj": True}
    (finding,) = audit_fused(quantized, awq("gate"))
    assert "vLLM takes 1 quantized linear for float because of 'gate' in" in finding.problem
    assert finding.tensor == "m.0.mlp.gate_proj"


def test_an_entry_inside_a_name_covers_for_vllm_and_not_for_transformers() -> None:
    quantized = linears("self_attn")
    (finding,) = audit_fused(quantized, awq("self_attn"))
    assert finding.kind == "float linears that no skip entry covers for transformers"
    assert "8 of 9 float linears" in finding.problem
    assert audit_fused(quantized, awq("self_attn", "model.layers.*.self_attn")) == ()


def test_float_linears_without_an_entry_are_told_for_both_runtimes() -> None:
    found = audit_fused(linears("down_proj"), awq("o_proj"))
    for runtime in ("vLLM", "transformers"):
        finding = the_one(found, f"float linears that no skip entry covers for {runtime}")
        assert "2 of 3 float linears" in finding.problem
        wrong = the_one(found, f"skip entries that {runtime} reads as covering quantized linears")
        assert "2 quantized linears" in wrong.problem


def test_vllm_derives_an_empty_list_and_transformers_does_not() -> None:
    found = audit_fused(linears("down_proj"), awq())
    assert kinds(found) == [("warning", "float linears that no skip entry covers for transformers")]


def test_a_vision_tower_that_no_entry_covers_is_told() -> None:
    tower = {f"visual.blocks.{i}.attn.qkv": False for i in range(3)}
    found = audit_fused(linears("down_proj") | tower, awq("down_proj"))
    assert {f.tensor for f in found} == {"visual.blocks.0.attn.qkv"}
    assert len(found) == 2
    assert audit_fused(linears("down_proj") | tower, awq("down_proj", "visual")) == ()


def test_a_quantized_head_needs_lm_head_true_in_vllm() -> None:
    found = audit_fused(linears("down_proj", head=True), awq("down_proj"))
    assert any("vLLM" in f.kind and f.tensor == "lm_head" for f in found)
    assert any("transformers" in f.kind and f.tensor == "lm_head" for f in found)


RELEASE = tuple(int(part) for part in version("transformers").split(".")[:2])
NAMES = st.sampled_from([*modules(12), "visual.blocks.1.attn.qkv", "model.layers.1.mlp.gate"])
ENTRIES = st.sampled_from(
    ["model.layers.1", "model.layers.1.", "layers.1", "mlp", "gate", "visual", "q_proj", "proj",
     "model.layers.*.mlp", "model.layers.[02].", "model.layers.1|model.layers.11", "model", "l.0.mlp"]
)  # fmt: skip


@pytest.mark.skipif(RELEASE < (5, 24), reason="transformers matched names otherwise before 5.24")
@settings(max_examples=200, deadline=None)
@given(NAMES, st.lists(ENTRIES, min_size=1, max_size=3))
def test_transformers_reading_is_transformers_own(name: str, entries: list[str]) -> None:
    from transformers.quantizers.quantizers_utils import should_convert_module

    readings, _ = readings_of(awq(*entries), "lm_head")
    reads = {reading.runtime: reading.skips(name) is not None for reading in readings}
    assert reads["transformers"] == (not should_convert_module(name, entries))
    assert reads["vLLM"] == any(entry in name for entry in entries)


@settings(max_examples=200, deadline=None)
@given(NAMES, st.lists(ENTRIES | ENTRIES.map("re:{}".format) | NAMES, max_size=3))
def test_compressed_tensors_reading_is_the_package_s_own(name: str, entries: list[str]) -> None:
    import torch
    from compressed_tensors.utils.match import is_match

    entries = [entry for entry in entries if entry != "Linear"]
    readings, _ = readings_of(compressed(*entries), "lm_head")
    reads = {reading.runtime: reading.skips(name) is not None for reading in readings}
    own = bool(entries) and is_match(name, torch.nn.Linear(1, 1), entries)
    assert reads == {"vLLM": own, "transformers": own}


# compressed-tensors.


def test_an_ignored_class_is_ignored_by_transformers_alone() -> None:
    found = audit_fused(linears(), compressed("lm_head", "Linear"))
    assert kinds(found) == [
        ("warning", "skip entries that transformers reads as covering quantized linears")
    ]
    assert "14 quantized linears" in found[0].problem


def test_an_ignore_pattern_that_covers_quantized_linears_is_told_for_both() -> None:
    found = audit_fused(linears(), compressed("lm_head", "re:.*layers.1.mlp"))
    assert len(found) == 2
    assert all("3 quantized linears" in finding.problem for finding in found)


def test_a_pattern_is_anchored_at_the_start_only() -> None:
    found = audit_fused(linears(), compressed("lm_head", "re:layers.1.mlp"))
    assert found == ()


def test_a_quantized_head_must_be_named_in_targets_for_vllm() -> None:
    (finding,) = audit_fused(linears(head=True), compressed())
    assert finding.kind == "skip entries that vLLM reads as covering quantized linears"
    assert finding.tensor == "lm_head"
    assert "targets" in finding.problem


def test_a_float_head_that_is_not_ignored_is_packed_for_transformers() -> None:
    (finding,) = audit_fused(linears(), compressed())
    assert finding.kind == "float linears that no skip entry covers for transformers"
    assert finding.tensor == "lm_head"


def test_routers_need_no_entry() -> None:
    assert audit_fused(linears() | {"model.layers.0.mlp.gate": False}, compressed("lm_head")) == ()


# GPTQ and AutoRound.


def test_a_rule_by_shard_is_lost_under_the_fused_name() -> None:
    rules = {r"+:.*\.(q|k|v)_proj$": {"bits": 8}}
    found = audit_fused(linears(), gptq(rules))
    assert kinds(found) == [("warning", "rules that miss the fused name")] * 2
    assert "8 bits, groups of 32, symmetric for model.layers.0.self_attn.q_proj" in found[0].problem
    assert "4 bits" in found[0].problem
    both = {r"+:.*\.(q_proj|k_proj|v_proj|qkv_proj)$": {"bits": 8}}
    assert audit_fused(linears(), gptq(both)) == ()


def test_a_rule_that_skips_the_fused_name_of_quantized_shards_is_told_for_vllm() -> None:
    found = audit_fused(linears(), gptq({r"-:.*qkv_proj": {}}))
    finding = the_one(found, "skip entries that vLLM reads as covering quantized linears")
    assert finding.tensor == Q0
    assert "qkv_proj" in finding.problem
    assert not any("GPTQModel" in f.kind for f in found)


def test_a_rule_that_skips_quantized_linears_is_told_for_gptqmodel() -> None:
    found = audit_fused(linears(), gptq({r"-:.*down_proj": {}}))
    finding = the_one(found, "skip entries that GPTQModel reads as covering quantized linears")
    assert "2 quantized linears" in finding.problem
    assert "'-:.*down_proj' in dynamic" in finding.problem


def test_a_float_linear_in_a_quantized_block_needs_a_rule_for_gptqmodel() -> None:
    tower = {"visual.blocks.0.attn.qkv": False}
    (finding,) = audit_fused(linears("down_proj") | tower, gptq())
    assert finding.kind == "float linears that no skip entry covers for GPTQModel"
    assert "2 of 4 float linears" in finding.problem


def test_a_list_of_modules_to_quantize_is_a_skip_list_turned_round() -> None:
    inside = [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"]]
    config = gptq(modules_in_block_to_quantize=inside)
    assert audit_fused(linears("mlp"), config) == ()
    found = audit_fused(linears(), config)
    assert {finding.severity for finding in found} == {"warning"}
    assert all("6 quantized linears" in finding.problem for finding in found)


def test_autoround_s_own_answer_is_compared_with_the_tensors() -> None:
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True,
              "packing_format": "auto_round:auto_gptq",
              "extra_config": {Q0: {"bits": 16, "data_type": "float"}}}  # fmt: skip
    (finding,) = audit_fused(linears(), config)
    assert (finding.severity, finding.tensor) == ("warning", Q0)
    assert "extra_config" in finding.problem


# Hostile configs.


@pytest.mark.parametrize(
    "config",
    [
        awq() | {"modules_to_not_convert": "lm_head"},
        awq("(a+)+$"),
        awq("model.(" + "x"),
        compressed("re:(.*)*x"),
        compressed() | {"ignore": [3]},
        gptq({"-:(a*)*b": {}}),
        {"quant_method": "gptq"},
        {"quant_method": "auto-round", "bits": "x"},
    ],
)
def test_a_list_that_cannot_be_read_is_an_error_in_one_line(config: dict[str, Any]) -> None:
    finding = the_one(audit_fused(linears(), config), "cannot be read")
    assert finding.severity == "error"
    assert finding.line.isprintable()


@pytest.mark.parametrize(
    "config", [{"quant_method": 7}, {"quant_method": None}, {"config_groups": 1}]
)
def test_configs_of_no_known_method_are_no_crash(config: dict[str, Any]) -> None:
    assert all(finding.severity == "warning" for finding in audit_fused(linears(), config))


def test_long_names_are_not_matched_against_patterns() -> None:
    names = {f"{'a.' * 50_000}q_proj": False, Q0: True}
    for config in (
        awq("a.*a.*a.*a.*b"),
        compressed("re:a.*a.*a.*a.*b"),
        gptq({"-:a.*a.*a.*b": {}}),
    ):
        assert all(finding.line.isprintable() for finding in audit_fused(names, config))


def test_matching_that_takes_too_long_is_given_up_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from weightpath.checkpoints import audit_skips

    monkeypatch.setattr(audit_skips, "_SECONDS", -1.0)
    (finding,) = audit_fused(linears(), awq("model.layers.1"))
    assert (finding.severity, finding.kind) == ("warning", "skip list too long")
    assert "not checked to the end" in finding.mend
