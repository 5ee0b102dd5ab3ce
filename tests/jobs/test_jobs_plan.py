"""From a checkpoint to its shapes, and from those to a plan."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import weightpath
from tiny_checkpoint import edit_tensors, make_checkpoint
from weightpath.checkpoints.store import open_checkpoint
from weightpath.device.profile import HardwareProfile, from_dict
from weightpath.errors import BadRequest
from weightpath.jobs.make import make
from weightpath.jobs.plan import plan_model, plan_scheme
from weightpath.jobs.shapes import model_shapes, stored_dtype
from weightpath.paths.evidence import Evidence
from weightpath.paths.tensors import TensorPlan
from weightpath.scheme import INT8, Scheme


def machine(**facts: Any) -> HardwareProfile:
    flags = ["avx2", "avx512f", "avx512_vnni", "avx512_bf16"]
    plain = {"arch": "x86_64", "cpu_flags": flags, "ram_total": 8 << 30}
    return from_dict(plain | facts, "test")


def planned(source: Path, **options: Any) -> TensorPlan:
    return plan_model(
        "m", open_checkpoint(source), machine(), evidence=Evidence(), **options
    ).tensors


def test_the_shapes_are_the_checkpoints_own(tiny_llama: Path) -> None:
    shapes = model_shapes(open_checkpoint(tiny_llama))
    found = {shape.name: shape for shape in shapes.linears}
    assert len(found) == 16
    assert (found["lm_head"].role, found["model.embed_tokens"].role) == ("head", "embedding")
    down = found["model.layers.1.mlp.down_proj"]
    assert (down.out_features, down.in_features, down.role) == (64, 128, "linear")
    assert not shapes.tied
    assert shapes.dtype == "bfloat16"


def test_a_tied_matrix_counts_once(tiny_tied: Path, tiny_llama: Path) -> None:
    tied = model_shapes(open_checkpoint(tiny_tied))
    untied = model_shapes(open_checkpoint(tiny_llama))
    assert tied.tied
    assert [shape.role for shape in tied.linears].count("tied_head") == 1
    assert "embedding" not in {shape.role for shape in tied.linears}
    assert untied.total_bytes - tied.total_bytes == 128 * 64 * 2


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
def test_floats_are_stored_as_fp16_or_bf16(
    tmp_path: Path, dtype: torch.dtype, wanted: torch.dtype
) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path, dtype=dtype))
    assert stored_dtype(checkpoint) == wanted
    assert model_shapes(checkpoint).dtype == str(wanted).removeprefix("torch.")


def test_most_bytes_decide_the_stored_dtype(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, dtype=torch.float16)
    edit_tensors(
        folder,
        lambda t: t.update({name: value.float() for name, value in t.items() if "norm" in name}),
    )
    assert stored_dtype(open_checkpoint(folder)) == torch.float16


def test_a_head_stored_twice_counts_by_whether_it_differs(tiny_tied: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_tied, tmp_path / "copy"))
    alone = model_shapes(open_checkpoint(tiny_tied))
    edit_tensors(
        source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    assert model_shapes(open_checkpoint(source)) == alone
    edit_tensors(source, lambda t: t["lm_head.weight"].neg_())
    twice = model_shapes(open_checkpoint(source))
    assert not twice.tied
    assert twice.total_bytes == alone.total_bytes + 128 * 64 * 2


def test_one_group_size_for_the_model_and_the_reason_names_the_tensor(tiny_llama: Path) -> None:
    plan = planned(tiny_llama)
    assert plan.group_size == 64
    assert "64 (model.layers.0.self_attn.q_proj) is not a multiple of 128" in plan.group_reason


def test_a_width_of_576_takes_groups_of_64(tmp_path: Path) -> None:
    source = make_checkpoint(
        tmp_path, hidden_size=576, intermediate_size=1536, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, num_hidden_layers=1, tie_word_embeddings=True,
    )  # fmt: skip
    plan = planned(source)
    assert plan.group_size == 64
    assert plan.unties_head
    assert {d.scheme.name for d in plan.decisions if d.scheme} == {"w4a8g64-asym", "w8"}


@pytest.mark.parametrize(("bits", "scheme"), [(16, None), (8, "w8"), (4, "w4a8g64-asym")])
def test_the_head_takes_the_bits_that_are_asked_for(
    tiny_llama: Path, bits: int, scheme: str | None
) -> None:
    head = next(d for d in planned(tiny_llama, head_bits=bits).decisions if d.shape.role == "head")
    assert (head.scheme.name if head.scheme else None) == scheme


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_bits": 5}, "head of 5 bits: use 16, 8 or 4"),
        ({"head_bits": 0}, "head of 0 bits"),
        ({"group_size": 7}, r"group size 7: divides no in_features .*\(64, 128\)"),
        ({"group_size": 0}, "group size 0: use -1"),
        ({"priority": "style"}, "priority 'style': unknown"),
        ({"runtime": "abacus"}, "runtime 'abacus': unknown"),
    ],
    ids=str,
)
def test_a_contradictory_request_is_one_clear_line(
    tiny_llama: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        planned(tiny_llama, **options)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["w3g64", "w8g64", "w8-asym", "w2", "w5g32"])
def test_a_scheme_that_no_module_runs_is_refused(tiny_llama: Path, name: str) -> None:
    with pytest.raises(BadRequest, match=f"scheme {name}: this version makes int8"):
        plan_scheme("m", open_checkpoint(tiny_llama), Scheme.parse(name))


def test_the_plans_scheme_is_that_of_most_linears(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "most", hidden_size=40, intermediate_size=128)
    made = plan_scheme("m", open_checkpoint(source), Scheme.parse("w4a8g64"))
    names = [d.scheme.name for d in made.tensors.decisions if d.scheme and d.shape.role == "linear"]
    assert names[0] == "w8"
    assert (names.count("w8"), names.count("w4a8g64")) == (10, 4)
    assert made.scheme == INT8
    four = make_checkpoint(tmp_path / "four", hidden_size=64, intermediate_size=72)
    made = plan_scheme("m", open_checkpoint(four), Scheme.parse("w4a8g64"))
    assert made.scheme == Scheme.parse("w4a8g64")
    made = plan_model("m", open_checkpoint(source), machine(cpu_flags=[]), runtime="weightpath",
                      evidence=Evidence())  # fmt: skip
    assert made.scheme is not None


@pytest.mark.parametrize(("priority", "bits"), [("speed", 8), ("fidelity", 16)])
def test_the_paths_activation_bits_are_the_plans_and_go_into_the_manifest(
    tiny_llama: Path, tmp_path: Path, priority: str, bits: int
) -> None:
    made = plan_model("m", open_checkpoint(tiny_llama), machine(), priority, evidence=Evidence())
    assert made.activation_bits == bits
    make(str(tiny_llama), tmp_path / "out", priority=priority, profile=machine())
    manifest = json.loads((tmp_path / "out" / "weightpath.json").read_text())
    assert (manifest["path"], manifest["activation_bits"]) == (made.path_name, bits)
    assert weightpath.load(tmp_path / "out").weightpath.activation_bits == bits  # type: ignore[union-attr]


def test_a_phone_takes_an_exported_graph(tiny_llama: Path) -> None:
    profile = weightpath.probe(device="snapdragon-8-gen-3")
    made = weightpath.plan(tiny_llama, profile)
    assert made.path_name.startswith("export")
    assert json.dumps(made.to_dict())


def test_the_json_form_names_schemes_and_counts_bytes(tiny_llama: Path) -> None:
    made = plan_model("m", open_checkpoint(tiny_llama), machine(), evidence=Evidence())
    plain = json.loads(json.dumps(made.to_dict()))
    tensors = plain["tensors"]
    assert tensors["file_bytes"] == made.tensors.file_bytes
    assert {d["scheme"] for d in tensors["decisions"]} == {"w4a8g64-asym", "w8", None}
    assert plain["selection"]["path"]["name"] == "w4a8-vnni"
    assert plain["selection"]["verified"] is False


def test_a_gguf_file_is_planned(tmp_path: Path) -> None:
    from tiny_gguf import write_tiny_gguf

    made = weightpath.plan(write_tiny_gguf(tmp_path / "m.gguf"), machine())
    assert made.tensors.group_size == 64
