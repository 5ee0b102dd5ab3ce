"""Column orders folded into the layers before: the model computes the same; what cannot be folded
is quantized again and says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reopened import check_told, of, state_of, tensors_of
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import tiny_linears
from tiny_checkpoint import edit_tensors
from tiny_formats import write
from tiny_linears import Asked
from weightpath.checkpoints.low_bit import open_low_bit
from weightpath.checkpoints.opened import Outline
from weightpath.errors import BadRequest
from weightpath.jobs.convert import Converted, convert
from weightpath.jobs.folds import plan_folds
from weightpath.qweight import QWeight
from weightpath.scheme import Scheme

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 4, 2, 64, 256
SIZES = {"head_dim": HEAD_DIM, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
O_PROJ, DOWN = "self_attn.o_proj", "mlp.down_proj"
FED_BY = {O_PROJ: ("self_attn.v_proj",), DOWN: ("mlp.gate_proj", "mlp.up_proj")}
TEXT = {"model_type": "llama", "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
Ranks = dict[str, np.ndarray]


def alike_in_heads(seed: int) -> np.ndarray:
    """A rank for every column of o_proj: within a head, the same in the query heads of a KV head."""
    draw = np.random.default_rng(seed)
    orders = [draw.permutation(HEAD_DIM) for _ in range(KV_HEADS)]
    return np.concatenate(
        [orders[head * KV_HEADS // HEADS] + head * HEAD_DIM for head in range(HEADS)]
    )


def any_order(seed: int, count: int = INTERMEDIATE) -> np.ndarray:
    return np.random.default_rng(seed).permutation(count)


def foldable(layer: int) -> Ranks:
    return {O_PROJ: alike_in_heads(layer), DOWN: any_order(layer + 7)}


def act_order(
    folder: Path, ranks: Callable[[int], Ranks] = foldable, symmetric: bool = True, **options: Any
) -> Path:
    """GPTQ with a g_idx of its own for some linears of every layer, and trivial ones elsewhere."""
    options = {"model": SIZES, "group_size": 32} | options
    source = write("gptq-v1", folder, symmetric=symmetric, **options)
    asked = Asked(4, options["group_size"], symmetric)

    def regroup(tensors: dict[str, Tensor]) -> None:
        for layer in range(2):
            for leaf, order in ranks(layer).items():
                module = f"model.layers.{layer}.{leaf}"
                made, _ = tiny_linears.gptq(source.weights[module], asked, order, v1=True)
                tensors |= {f"{module}.{suffix}": part for suffix, part in made.items()}

    edit_tensors(source.folder, regroup)
    config = json.loads((source.folder / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (source.folder / "config.json").write_text(json.dumps(config))
    return source.folder


def logits(place: Path, config_of: Path) -> Tensor:
    """Logits [24, V] of the float model in fp64 with the weights that a checkpoint stands for."""
    said = json.loads((config_of / "config.json").read_text())
    said.pop("quantization_config", None)
    config = AutoConfig.for_model(**said)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.to(torch.float64).eval()
    model.load_state_dict(state_of(place), strict=True)
    ids = torch.randint(3, 64, (1, 24), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return model(input_ids=ids).logits[0]


def same(first: Tensor, second: Tensor) -> bool:
    """Up to the order of sums in fp64."""
    return torch.allclose(first, second, rtol=0, atol=1e-10 * float(second.abs().max()))


def check_folded(done: Converted, leaves: tuple[str, ...] = (O_PROJ, DOWN)) -> None:
    for layer in range(2):
        for leaf in leaves:
            assert "column order folded into the rows" in of(done, f"model.layers.{layer}.{leaf}").how  # fmt: skip
            for feeding in FED_BY[leaf]:
                module = f"model.layers.{layer}.{feeding}"
                told = {item.name: item.how for item in (*done.linears, *done.floats)}
                how = told.get(module) or told[f"{module}.weight"]
                assert "rows take the column order of the layer after" in how
    assert done.lossy == 0
    assert all(item.exact for item in done.floats)
    assert not any(name.endswith("g_idx") for name in tensors_of(done.folder))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("to", ["compressed-tensors", "awq"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_folded_orders_leave_the_model_s_logits_and_every_weight_exact(
    kind: str, to: str, symmetric: bool, tmp_path: Path
) -> None:
    source = act_order(tmp_path / "in", symmetric=symmetric, model={"kind": kind, **SIZES})
    done = convert(str(source), to, tmp_path / "out", exact_only=True)
    check_folded(done)
    if kind == "qwen2":
        assert of(done, "model.layers.0.self_attn.v_proj.bias").exact
    assert same(logits(tmp_path / "out", source), logits(source, source))


def test_biases_of_gate_up_and_v_take_the_order_too(tmp_path: Path) -> None:
    biases = {"attention_bias": True, "mlp_bias": True, **SIZES}
    source = act_order(tmp_path / "in", model=biases)
    done = convert(str(source), "compressed-tensors", tmp_path / "out", exact_only=True)
    check_folded(done)
    before, after = tensors_of(source), tensors_of(done.folder)
    moved = {n for n in before if n.endswith("bias") and not torch.equal(before[n], after[n])}
    leaves = {name.split(".")[-2] for name in moved}
    assert leaves == {"v_proj", "gate_proj", "up_proj"}
    assert same(logits(done.folder, source), logits(source, source))


def test_float_layers_that_feed_an_ordered_one_have_their_rows_moved(tmp_path: Path) -> None:
    source = act_order(tmp_path / "in")
    weights = {
        module: open_low_bit(source).read_linear(module).weight().half()
        for layer in range(2)
        for feeding in (*FED_BY[O_PROJ], *FED_BY[DOWN])
        for module in [f"model.layers.{layer}.{feeding}"]
    }

    def as_floats(tensors: dict[str, Tensor]) -> None:
        for module, weight in weights.items():
            for name in [name for name in tensors if name.startswith(f"{module}.")]:
                del tensors[name]
            tensors[f"{module}.weight"] = weight

    edit_tensors(source, as_floats)
    done = convert(str(source), "compressed-tensors", tmp_path / "out", exact_only=True)
    check_folded(done)
    assert same(logits(done.folder, source), logits(source, source))


@pytest.mark.parametrize("moved", ["mlp.up_proj", "self_attn.v_proj"])
def test_sabotage_rows_left_in_their_old_order_give_other_logits(
    moved: str, tmp_path: Path
) -> None:
    source = act_order(tmp_path / "in")
    done = convert(str(source), "compressed-tensors", tmp_path / "out")
    module = f"model.layers.1.{moved}"
    kept = convert(str(act_order(tmp_path / "plain", lambda _: {})), "compressed-tensors", tmp_path / "b")  # fmt: skip
    before = tensors_of(kept.folder)
    names = [name for name in before if name.startswith(f"{module}.")]
    edit_tensors(done.folder, lambda t: t.update({name: before[name] for name in names}))
    assert not same(logits(done.folder, source), logits(source, source))


def test_a_group_over_two_query_heads_is_cut_and_folded(tmp_path: Path) -> None:
    """Half of each query head's columns in one group: runs of 32 that two groups of 64 share."""

    def spread(layer: int) -> Ranks:
        draw = np.random.default_rng(layer)
        rank = np.empty((KV_HEADS, HEADS // KV_HEADS, HEAD_DIM), np.int64)
        for kv in range(KV_HEADS):
            half, place = np.divmod(draw.permutation(HEAD_DIM), HEAD_DIM // 2)
            for query in range(HEADS // KV_HEADS):
                rank[kv, query] = kv * 128 + half * 64 + query * 32 + place
        return {O_PROJ: rank.reshape(-1)}

    source = act_order(tmp_path / "in", spread, group_size=64)
    assert open_low_bit(source).linears[f"model.layers.0.{O_PROJ}"].ordered
    done = convert(str(source), "compressed-tensors", tmp_path / "out", exact_only=True)
    check_folded(done, (O_PROJ,))
    assert of(done, f"model.layers.0.{O_PROJ}").target == "w4g32"
    assert same(logits(done.folder, source), logits(source, source))


@pytest.mark.parametrize("options", [{"static_groups": True}, {"changes": {"desc_act": True}}])
@pytest.mark.parametrize("to", ["compressed-tensors", "awq", "gptq"])
def test_a_trivial_g_idx_is_dropped_whatever_the_label_says(
    to: str, options: dict[str, Any], tmp_path: Path
) -> None:
    source = write("gptq-v1", tmp_path / "in", **options)
    assert source.settings["desc_act"] is True
    done = convert(str(source.path), to, tmp_path / "out", exact_only=True)
    check_told(done, source.weights)
    settings = json.loads((done.folder / "config.json").read_text())["quantization_config"]
    assert settings.get("desc_act", False) is False
    assert not any("order" in item.how for item in done.linears)


def test_orders_of_the_residual_stream_are_quantized_again_and_never_dropped(
    tmp_path: Path,
) -> None:
    source = write("gptq-v1", tmp_path / "in", ordered=True, symmetric=False)
    done = convert(str(source.path), "compressed-tensors", tmp_path / "out")
    for item in done.linears:
        leaf = item.name.rpartition(".")[2]
        if leaf == "down_proj":
            assert item.exact
            continue
        assert not item.exact
        assert 0 < item.mean_change < item.largest_change
        why = "do not fall alike in the 2 query heads" if leaf == "o_proj" else "residual stream"
        assert "quantized again as w4g32-asym" in item.how
        assert why in item.how
    with pytest.raises(BadRequest, match="12 of 14 linears cannot be converted exactly"):
        convert(str(source.path), "compressed-tensors", tmp_path / "b", exact_only=True)


@pytest.mark.parametrize("to", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("name", ["gptq-v2", "ct-ordered"])
def test_gptq_keeps_an_order_in_its_g_idx(name: str, to: str, tmp_path: Path) -> None:
    source = write(name, tmp_path / "in", ordered=True, bits=3 if name == "gptq-v2" else 4)
    done = convert(str(source.path), to, tmp_path / "out", exact_only=True)
    check_told(done, source.weights)
    assert {item.how for item in done.linears} == {"column order kept"}
    before, after = tensors_of(source.folder), tensors_of(done.folder)
    for module in source.weights:
        kept = before[f"{module}.g_idx" if name == "gptq-v2" else f"{module}.weight_g_idx"]
        assert torch.equal(after[f"{module}.g_idx"], kept)
    settings = json.loads((done.folder / "config.json").read_text())["quantization_config"]
    assert settings["desc_act"] is True


def test_an_order_over_a_last_group_cut_short_has_no_place_in_gptq_and_folds_elsewhere(
    tmp_path: Path,
) -> None:
    source = act_order(
        tmp_path / "in", lambda layer: {DOWN: any_order(layer, 192)}, group_size=64,
        model={"intermediate_size": 192},
    )  # fmt: skip

    def join(tensors: dict[str, Tensor]) -> None:
        """Groups 0 and 1 of every linear become one of 128; down_proj's third stays alone."""
        for name in [name for name in tensors if name.endswith(".g_idx")]:
            module = name.removesuffix(".g_idx")
            tensors[name] = tensors[name] // 2
            for part in ("scales", "qzeros"):
                tensors[f"{module}.{part}"] = tensors[f"{module}.{part}"][::2].contiguous()

    edit_tensors(source, join)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["group_size"] = 128
    (source / "config.json").write_text(json.dumps(config))
    done = convert(str(source), "gptq", tmp_path / "gptq")
    assert of(done, f"model.layers.0.{DOWN}").how == (
        "quantized again as w4g64: its groups of 128 do not tile 192 columns"
    )
    done = convert(str(source), "compressed-tensors", tmp_path / "ct", exact_only=True)
    check_folded(done, (DOWN,))
    assert same(logits(done.folder, source), logits(source, source))


def outlines(prefix: str) -> tuple[dict[str, Outline], QWeight]:
    """v_proj and an ordered o_proj of one block, and o_proj's integers."""
    order = torch.from_numpy(alike_in_heads(0) // 32)
    qweight = QWeight(
        Scheme(4, 32), torch.zeros((8, 256), dtype=torch.uint8), torch.ones(8, 8), g_idx=order
    )
    return {
        f"{prefix}.v_proj": Outline(Scheme(4, 32), (128, 8)),
        f"{prefix}.o_proj": Outline(Scheme(4, 32), (8, 256), ordered=True),
    }, qweight


@pytest.mark.parametrize(
    ("prefix", "folded"),
    [
        ("model.layers.0.self_attn", True),
        ("model.language_model.layers.11.self_attn", True),
        ("language_model.model.layers.3.self_attn", True),
        ("vision_tower.transformer.layers.0.attention", False),
        ("model.vision_tower.layers.0.self_attn", False),
        ("mtp.layers.0.self_attn", False),
        ("self_attn", False),
    ],
)
def test_only_blocks_of_the_language_model_are_folded_since_a_vision_tower_has_other_heads(
    prefix: str, folded: bool
) -> None:
    made, qweight = outlines(prefix)
    folds = plan_folds(made, {}, {"model_type": "llava", "text_config": TEXT}, lambda _: qweight)
    assert (f"{prefix}.o_proj" in folds.columns) == folded
    assert folds.outlines[f"{prefix}.o_proj"].ordered != folded
    if not folded:
        assert "no block of the language model" in folds.why_not[f"{prefix}.o_proj"]


def test_a_linear_whose_feeding_layer_is_fused_or_absent_is_not_folded() -> None:
    made, qweight = outlines("model.layers.0.self_attn")
    del made["model.layers.0.self_attn.v_proj"]
    folds = plan_folds(made, {}, TEXT, lambda _: qweight)
    assert not folds.columns
    assert "v_proj is not there" in folds.why_not["model.layers.0.self_attn.o_proj"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_type": "gemma2"}, "model_type 'gemma2' was not read"),
        ({"num_attention_heads": None}, "does not say how many heads"),
        ({"num_attention_heads": "4"}, "does not say how many heads"),
        ({"num_attention_heads": 0}, "does not say how many heads"),
        ({"num_key_value_heads": 3}, "are not 4 query heads of 64 over 3"),
        ({"num_key_value_heads": 4}, "v_proj has 128 rows, the fold would order 256"),
        ({"num_key_value_heads": None}, "v_proj has 128 rows, the fold would order 256"),
    ],
)
def test_a_config_that_does_not_tell_the_heads_folds_no_o_proj_and_says_so(
    change: dict[str, Any], why: str
) -> None:
    made, qweight = outlines("model.layers.0.self_attn")
    folds = plan_folds(made, {}, {**TEXT, **change}, lambda _: qweight)
    assert not folds.columns
    assert why in folds.why_not["model.layers.0.self_attn.o_proj"]
