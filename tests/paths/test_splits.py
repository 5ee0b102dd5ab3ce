"""Tensor parallelism: which linears cannot be split, and what would help."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightpath.paths.held import HeldLinear
from weightpath.paths.splits import Split, splits
from weightpath.scheme import INT8, Scheme

CT = "compressed-tensors pack-quantized"
ATTENTION, MLP = "model.layers.0.self_attn.", "model.layers.0.mlp."


def split(name: str, scheme: Scheme | None, shape: tuple[int, int], tp: int, form: str = CT,
          heads: int | None = None, kv_heads: int | None = None, **more) -> Split:  # fmt: skip
    (found,) = splits((HeldLinear(name, scheme, shape, **more),), form, tp, heads, kv_heads)
    return found


def test_a_group_that_straddles_shards_is_cut_exactly_into_one_that_does_not():
    found = split(MLP + "down_proj", Scheme(4, 64), (128, 192), 2)
    assert found.parallel == "row"
    assert found.problem == "a group of 64 straddles shards of 192 / 2 = 96 columns"
    assert "--group-size 32, which cuts its groups of 64 exactly" in found.mend
    assert "repeated 2 times" in found.mend
    assert "pad intermediate_size from 192 to 256" in found.mend
    assert "use tp 1" in found.mend
    assert not split(MLP + "down_proj", Scheme(4, 32), (128, 192), 2).problem


def test_a_shard_that_no_group_tiles_goes_per_channel():
    found = split(MLP + "down_proj", Scheme(4, 64), (128, 192), 4)
    assert "192 / 4 = 48" in found.problem
    assert "quantize it again per output channel" in found.mend
    assert not split(MLP + "down_proj", Scheme(4), (128, 192), 4).problem


def test_the_largest_smaller_group_and_the_largest_other_tp_are_named():
    found = split(MLP + "down_proj", Scheme(4, 128), (128, 1536), 8)
    assert "--group-size 64, which cuts its groups of 128" in found.mend
    assert "use tp 4" in found.mend
    again = split(MLP + "down_proj", Scheme(4, 96), (128, 192), 3)
    assert again.mend.startswith("quantize it again in groups of 64")


def test_a_group_of_a_whole_number_of_shards_is_fine():
    assert not split(MLP + "down_proj", Scheme(4, 128), (128, 1536), 2).problem
    assert not split(ATTENTION + "o_proj", Scheme(4, 128), (256, 256), 2).problem


def test_rows_split_by_outputs_alone_ask_nothing_of_groups():
    for leaf in ("q_proj", "gate_proj", "up_proj"):
        assert not split(MLP + leaf, Scheme(4, 128), (192, 128), 4).problem


def test_outputs_that_do_not_divide_are_named():
    found = split(MLP + "gate_proj", Scheme(4, 64), (100, 128), 8)
    assert (found.parallel, found.problem) == ("column", "out_features 100 is not a multiple of 8")
    assert "use tp 4" in found.mend
    assert "not a multiple of 4" in split(MLP + "down_proj", INT8, (64, 90), 4).problem


@pytest.mark.parametrize("form", ["AWQ gemm", "GPTQ v1", "AutoRound (gptq)"])
def test_words_packed_along_outputs_bound_a_shard(form):
    found = split(MLP + "up_proj", Scheme(4, 64), (24, 128), 2, form)
    assert f"ends within a word, which packs 8 of them ({form})" in found.problem
    assert "convert --to compressed-tensors" in found.mend
    assert not split(MLP + "up_proj", Scheme(4, 64), (32, 128), 2, form).problem


def test_compressed_tensors_packs_only_zero_points_along_outputs():
    assert not split(MLP + "up_proj", Scheme(4, 64), (24, 128), 2).problem
    uneven = split(MLP + "up_proj", Scheme(4, 64, symmetric=False), (24, 128), 2)
    assert "packs 8" in uneven.problem
    assert "packs 4" in split(MLP + "up_proj", Scheme(8, 64, False), (12, 128), 2).problem
    assert "packs 32" in split(MLP + "up_proj", Scheme(3, 64, False), (96, 128), 2).problem


def test_words_packed_along_inputs_bound_a_row_shard():
    found = split(MLP + "down_proj", Scheme(4), (64, 24), 2)
    assert "a shard of 12 columns ends within a block of 8" in found.problem
    assert not split(MLP + "down_proj", Scheme(4), (64, 24), 2, "AWQ gemm").problem
    assert not split(MLP + "down_proj", INT8, (64, 24), 2).problem
    assert not split(MLP + "down_proj", INT8, (64, 6), 2,
                     "compressed-tensors int-quantized").problem  # fmt: skip


def test_gguf_blocks_bound_a_row_shard():
    assert (
        "block of 256" in split(MLP + "down_proj", Scheme(4, 32), (64, 384), 2, "GGUF Q4_K").problem
    )
    assert not split(MLP + "down_proj", Scheme(4, 32), (64, 384), 2, "GGUF Q4_0").problem


def test_fewer_key_value_heads_than_shards_are_copied():
    def keys(kv_heads: int, tp: int, form: str = "AWQ gemm") -> str:
        shape = (kv_heads * 16, 128)
        return split(ATTENTION + "k_proj", Scheme(4, 64), shape, tp, form, 8, kv_heads).problem

    assert keys(2, 8) == keys(1, 4) == keys(4, 2) == ""
    assert keys(3, 2) == "3 key/value heads cannot be shared out to 2"
    assert keys(3, 8) == "3 key/value heads cannot be shared out to 8"
    # without the number of heads only rows can be asked
    alone = split(ATTENTION + "k_proj", Scheme(4, 64), (32, 128), 8, "AWQ gemm")
    assert "packs 8" in alone.problem


def test_query_heads_are_shared_out_whole():
    found = split(ATTENTION + "q_proj", Scheme(4, 64), (9 * 64, 576), 2, heads=9, kv_heads=3)
    assert found.problem == "9 query heads cannot be shared out to 2"
    assert not split(
        ATTENTION + "q_proj", Scheme(4, 64), (576, 576), 3, heads=9, kv_heads=3
    ).problem


def test_a_head_is_padded_to_a_multiple_of_64_before_it_is_split():
    def head(vocabulary: int, tp: int) -> str:
        shape = (vocabulary, 128)
        return split("lm_head", Scheme(4, 64), shape, tp, "AWQ gemm", role="head").problem

    assert not head(1001, 8)
    assert "packs 8" in head(64, 16)


def test_a_column_order_cannot_be_split_by_columns_and_can_by_rows():
    found = split(MLP + "down_proj", Scheme(4, 64), (128, 256), 2, "GPTQ v1", ordered=True)
    assert "order of their own" in found.problem
    assert "folds its order" in found.mend
    assert not split(MLP + "up_proj", Scheme(4, 64), (128, 256), 2, "GPTQ v1", ordered=True).problem


def test_unknown_names_are_said_to_be_unknown_and_routers_are_copied():
    assert split("transformer.h.0.c_attn", Scheme(4, 64), (128, 128), 2).parallel == "unknown"
    assert split(MLP + "gate", Scheme(4, 64), (8, 128), 16).parallel == "replicated"


def test_floats_of_a_codebook_are_split_by_sides_alone():
    assert not split(MLP + "down_proj", None, (64, 192), 2, "bitsandbytes").problem
    assert split(MLP + "down_proj", None, (64, 191), 2, "bitsandbytes").problem


@given(
    st.sampled_from(("q_proj", "up_proj", "down_proj", "o_proj")),
    st.sampled_from((2, 3, 4, 8)),
    st.sampled_from((-1, 16, 32, 64, 128)),
    st.booleans(),
    st.integers(1, 40).map(lambda i: 8 * i),
    st.integers(1, 20).map(lambda i: 64 * i),
    st.sampled_from((2, 4, 8)),
    st.sampled_from((CT, "AWQ gemm", "GPTQ v1", "GGUF Q4_0")),
)
def test_every_problem_has_a_mend_and_a_named_tp_or_group_does_split(
    leaf, bits, group, symmetric, n, k, tp, form
):
    scheme = Scheme(bits, group, symmetric)
    found = split(MLP + leaf, scheme, (n, k), tp, form)
    assert bool(found.problem) == bool(found.mend)
    for way in found.mend.split(", or "):
        if way.startswith("use tp "):
            other = int(way.removeprefix("use tp "))
            assert not split(MLP + leaf, scheme, (n, k), other, form).problem
        if "--group-size" in way:
            size = int(way.split("--group-size ")[1].split(",")[0])
            again = split(MLP + leaf, Scheme(bits, size, symmetric), (n, k), tp, form)
            assert "straddles" not in again.problem
        if way.startswith("pad intermediate_size"):
            padded = int(way.rpartition(" ")[2])
            assert not split(MLP + leaf, scheme, (n, padded), tp, form).problem
