"""The plan for tensors: group sizes, tensors that no group divides, heads, and the bytes."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightpath.errors import BadRequest
from weightpath.paths.tensors import (
    LinearShape,
    ModelShapes,
    TensorPlan,
    plan_tensors,
    stored_bytes,
)
from weightpath.scheme import INT8, Scheme

W4 = Scheme(4, 128)
W4_ASYMMETRIC = Scheme(4, 128, symmetric=False)


def model(*linears: LinearShape, tied: bool = False, dtype: str = "bfloat16", extra: int = 0):
    """Shapes whose checkpoint holds exactly these weights and `extra` bytes."""
    width = 4 if dtype == "float32" else 2
    total = sum(shape.out_features * shape.in_features * width for shape in linears)
    return ModelShapes(tuple(linears), tied, dtype, total + extra)


def of_columns(*columns: int) -> ModelShapes:
    return model(*(LinearShape(f"k{k}", 64, k) for k in columns))


def smollm2() -> ModelShapes:
    """SmolLM2-135M: hidden 576, intermediate 1536, 30 layers, tied head of 49152."""
    layer = [("q", 576, 576), ("k", 192, 576), ("v", 192, 576), ("o", 576, 576),
             ("gate", 1536, 576), ("up", 1536, 576), ("down", 576, 1536)]  # fmt: skip
    linears = [LinearShape(f"{i}.{name}", n, k) for i in range(30) for name, n, k in layer]
    head = LinearShape("lm_head", 49152, 576, "tied_head")
    return model(*linears, head, tied=True, extra=61 * 576 * 2)


def decided(plan: TensorPlan) -> dict[str, Scheme | None]:
    return {item.name: item.scheme for item in plan.decisions}


def reason_of(plan: TensorPlan, name: str) -> str:
    return next(item.reason for item in plan.decisions if item.name == name)


@pytest.mark.parametrize(
    ("columns", "group"),
    [
        ((576, 1536), 64),
        ((512, 1536), 128),
        ((96,), 32),
        ((96, 128, 64), 32),
        ((192, 128), 64),
        ((4096, 100), 128),
        ((100, 576, 1536), 64),
    ],
)
def test_the_group_is_the_largest_that_divides_every_k_it_applies_to(columns, group):
    assert plan_tensors(of_columns(*columns), W4).group_size == group


def test_the_k_that_forced_a_smaller_group_is_named():
    reason = plan_tensors(of_columns(1536, 576), W4).group_reason
    assert "576 (k576) is not a multiple of 128" in reason
    assert "not a multiple" not in plan_tensors(of_columns(512), W4).group_reason


def test_a_tensor_that_no_group_divides_becomes_int8_and_spoils_no_other():
    plan = plan_tensors(of_columns(128, 100, 256), W4)
    assert decided(plan) == {"k128": W4, "k100": INT8, "k256": W4}
    assert "in_features 100 is no multiple of 128, 64 or 32" in reason_of(plan, "k100")


def test_a_model_that_no_group_divides_is_int8_throughout():
    plan = plan_tensors(of_columns(100, 36), W4)
    assert plan.group_size is None
    assert set(decided(plan).values()) == {INT8}
    assert "36, 100" in plan.group_reason


@settings(deadline=None)
@given(
    columns=st.lists(st.integers(1, 80).map(lambda n: n * 4), min_size=1, max_size=8, unique=True)
)
def test_every_planned_group_tiles_its_tensor_and_no_larger_one_would(columns):
    plan = plan_tensors(of_columns(*columns), W4)
    for item in plan.decisions:
        assert item.scheme is not None
        assert item.scheme.divides(item.shape.in_features)
        assert (item.scheme == INT8) == (item.shape.in_features % 32 != 0)
    usable = [k for k in columns if k % 32 == 0]
    if usable and plan.group_size != 128:
        assert plan.group_size is not None
        assert any(k % (2 * plan.group_size) for k in usable)


def test_a_forced_group_applies_where_it_divides_and_the_rest_is_int8():
    plan = plan_tensors(of_columns(512, 576), W4, group_size=128)
    assert decided(plan) == {"k512": W4, "k576": INT8}
    assert "576 is no multiple of 128" in reason_of(plan, "k576")


@pytest.mark.parametrize("group", [16, 48, 256])
def test_an_unusual_group_is_allowed_where_it_divides_a_tensor(group):
    plan = plan_tensors(of_columns(768, 100), W4, group_size=group)
    assert decided(plan) == {"k768": Scheme(4, group), "k100": INT8}


@pytest.mark.parametrize("group", [48, 128, 0, -2])
def test_a_forced_group_that_divides_nothing_is_refused(group):
    with pytest.raises(BadRequest, match=f"group size {group}"):
        plan_tensors(of_columns(160, 320), W4, group_size=group)


def test_per_channel_can_be_forced_for_any_k():
    plan = plan_tensors(of_columns(100, 576), W4, group_size=-1)
    assert set(decided(plan).values()) == {Scheme(4)}


@pytest.mark.parametrize("scheme", [INT8, None])
def test_a_forced_group_contradicts_a_path_without_groups(scheme):
    with pytest.raises(BadRequest, match="choose a 4-bit path"):
        plan_tensors(of_columns(128), scheme, group_size=64)


def test_other_schemes_than_4_bit_and_int8_are_refused_with_the_names_of_those():
    for scheme in (Scheme(8, 128), Scheme(3, 64), Scheme(8, symmetric=False)):
        with pytest.raises(BadRequest, match="int8 or a 4-bit scheme"):
            plan_tensors(of_columns(128), scheme)


def test_a_tied_head_is_untied_as_int8_by_default():
    plan = plan_tensors(smollm2(), W4)
    assert decided(plan)["lm_head"] == INT8
    assert plan.unties_head
    assert "untied" in reason_of(plan, "lm_head")
    assert plan.group_size == 64


def test_a_head_of_16_bits_stays_tied():
    plan = plan_tensors(smollm2(), W4, head_bits=16)
    assert decided(plan)["lm_head"] is None
    assert not plan.unties_head
    assert "tied to the embedding" in reason_of(plan, "lm_head")


def test_a_head_of_4_bits_takes_the_linears_scheme_and_counts_for_the_group():
    plan = plan_tensors(smollm2(), W4, head_bits=4)
    assert decided(plan)["lm_head"] == Scheme(4, 64)
    odd = model(LinearShape("up", 64, 128), LinearShape("lm_head", 64, 96, "head"))
    assert plan_tensors(odd, W4).group_size == 128
    assert plan_tensors(odd, W4, head_bits=4).group_size == 32


def test_a_head_of_4_bits_beside_int8_linears_is_refused():
    with pytest.raises(BadRequest, match="--head 8"):
        plan_tensors(smollm2(), INT8, head_bits=4)
    with pytest.raises(BadRequest, match="16, 8 or 4"):
        plan_tensors(smollm2(), W4, head_bits=2)


def test_embeddings_stay_and_a_float_path_keeps_everything():
    shapes = model(LinearShape("embed", 100, 64, "embedding"), LinearShape("up", 64, 64))
    plan = plan_tensors(shapes, W4)
    assert decided(plan) == {"embed": None, "up": Scheme(4, 64)}
    assert "looked up" in reason_of(plan, "embed")
    floats = plan_tensors(smollm2(), None)
    assert set(decided(floats).values()) == {None}
    assert floats.file_bytes == floats.source_bytes
    assert floats.file_bits_per_weight == 16


def test_vllm_on_a_cpu_leaves_the_head_at_16_bits_and_says_what_else_loads(profiles):
    plan = plan_tensors(smollm2(), W4, runtime="vllm", profile=profiles["zen4"])
    assert decided(plan)["lm_head"] is None
    assert not plan.unties_head
    reason = reason_of(plan, "lm_head")
    assert "stays 16-bit and tied" in reason
    assert "takes 4-bit weights only, not an int8 head" in reason
    assert "--head 4" in reason
    four = plan_tensors(smollm2(), W4, head_bits=4, runtime="vllm", profile=profiles["zen4"])
    assert decided(four)["lm_head"] == Scheme(4, 64)
    assert four.unties_head


def test_vllm_on_a_gpu_loads_an_int8_head(profiles):
    plan = plan_tensors(smollm2(), W4_ASYMMETRIC, runtime="vllm", profile=profiles["h100"])
    assert decided(plan)["lm_head"] == INT8


def test_a_tensor_that_the_runtime_loads_neither_way_stays_16_bit(profiles):
    shapes = of_columns(128, 100)
    plan = plan_tensors(shapes, W4, runtime="vllm", profile=profiles["zen4"])
    assert decided(plan) == {"k128": W4, "k100": None}
    assert "stays in the model's dtype, because vLLM" in reason_of(plan, "k100")
    plan = plan_tensors(shapes, W4, group_size=16, runtime="vllm", profile=profiles["h100"])
    assert decided(plan)["k128"] == INT8
    assert "not 16" in reason_of(plan, "k128")


def test_a_runtime_that_depends_on_the_device_needs_a_profile():
    with pytest.raises(BadRequest, match="give a profile"):
        plan_tensors(smollm2(), W4, runtime="vllm")
    with pytest.raises(BadRequest, match="unknown"):
        plan_tensors(smollm2(), W4, runtime="mlx")


def test_stored_bytes_are_those_of_the_packed_tensors():
    shape = LinearShape("w", 64, 128)
    assert stored_bytes(shape, None, "bfloat16") == 64 * 128 * 2
    assert stored_bytes(shape, None, "float32") == 64 * 128 * 4
    assert stored_bytes(shape, Scheme(4, 32), "bfloat16") == 64 * 128 // 2 + 64 * 4 * 2
    zeros = 64 // 8 * 4 * 4
    assert stored_bytes(shape, Scheme(4, 32, False), "bfloat16") == 64 * 64 + 64 * 4 * 2 + zeros
    assert stored_bytes(shape, INT8, "bfloat16") == 64 * 128 + 64 * 4
    odd = LinearShape("odd", 12, 33)
    assert stored_bytes(odd, INT8, "bfloat16") == 12 * 9 * 4 + 12 * 4
    assert stored_bytes(LinearShape("z", 12, 32), Scheme(4, 32, False), "float16") == (
        12 * 16 + 12 * 2 + 2 * 4
    )


def test_bits_per_weight_are_the_formula_of_the_scheme():
    for scheme, expected in ((W4, 4 + 16 / 64), (W4_ASYMMETRIC, 4 + 20 / 64)):
        plan = plan_tensors(smollm2(), scheme, head_bits=16)
        assert plan.linear_bits_per_weight == expected
    per_row = plan_tensors(of_columns(128), INT8)
    assert per_row.linear_bits_per_weight == 8 + 32 / 128


def test_the_file_of_the_demo_model_is_counted_head_and_all():
    linears, head, norms = 30 * 3_538_944, 49152 * 576, 61 * 576
    kept = plan_tensors(smollm2(), W4, head_bits=16)
    packed = linears * 17 // 32
    assert kept.linear_bytes == packed
    assert kept.file_bytes == packed + 210 * 16 + (head + norms) * 2
    untied = plan_tensors(smollm2(), W4)
    assert untied.file_bytes == kept.file_bytes + head + 49152 * 4 + 16
    assert math.isclose(
        untied.matmul_bits_per_weight, 8 * (packed + head + 49152 * 4) / (linears + head)
    )
    assert 5.0 < untied.matmul_bits_per_weight < 5.1
    assert math.isclose(
        untied.file_bits_per_weight, 8 * untied.file_bytes / (linears + head + norms)
    )


def test_a_head_of_its_own_is_replaced_and_not_added():
    shapes = model(LinearShape("up", 64, 128), LinearShape("lm_head", 64, 128, "head"))
    plan = plan_tensors(shapes, W4)
    assert not plan.unties_head
    assert plan.file_bytes == (64 * 64 + 64 * 2 + 16) + (64 * 128 + 64 * 4 + 16)


def test_a_model_without_linears_has_an_empty_plan():
    plan = plan_tensors(ModelShapes((), False, "float16", 0), W4)
    assert plan.decisions == ()
    assert plan.linear_bits_per_weight == 0
    assert plan.file_bits_per_weight == 0


@pytest.mark.parametrize(
    "build",
    [
        lambda: LinearShape("x", 4, 4, "norm"),
        lambda: LinearShape("x", 0, 4),
        lambda: ModelShapes((), False, "int8", 0),
        lambda: model(LinearShape("x", 4, 4, "tied_head")),
        lambda: model(LinearShape("x", 4, 4, "head"), tied=True),
    ],
)
def test_shapes_that_cannot_be_are_refused(build):
    with pytest.raises(BadRequest):
        build()


def test_a_plan_is_plain_json():
    plain = json.loads(json.dumps(plan_tensors(smollm2(), W4).to_dict()))
    assert plain["group_size"] == 64
    last = plain["decisions"][-1]
    assert (last["scheme"], last["shape"], last["role"]) == ("w8", [49152, 576], "tied_head")
