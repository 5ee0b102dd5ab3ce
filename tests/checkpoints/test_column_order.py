"""Column order: what is trivial, what can be folded into neighbours exactly, and what cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from weightpath.checkpoints import column_order
from weightpath.checkpoints.column_order import Fold
from weightpath.errors import BadRequest
from weightpath.qweight import QWeight
from weightpath.scheme import PER_CHANNEL, Scheme

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
HIDDEN, INTERMEDIATE = HEADS * HEAD_DIM, 256


def made(n: int, k: int, size: int, seed: int, g_idx: Tensor | None = None) -> QWeight:
    generator = torch.Generator().manual_seed(seed)
    groups = 1 if size == PER_CHANNEL else -(-k // size)
    return QWeight(
        Scheme(4, size, symmetric=False),
        torch.randint(0, 16, (n, k), generator=generator).to(torch.uint8),
        torch.rand(n, groups, generator=generator) * 0.02 + 0.001,
        torch.randint(0, 16, (n, groups), generator=generator).to(torch.int16),
        g_idx=g_idx,
    )


def shuffled(k: int, size: int, seed: int) -> Tensor:
    """The g_idx of a whole act-order: columns dealt to groups of `size` at random."""
    order = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
    return (order // size).to(torch.int32)


def within_heads(size: int, seed: int) -> Tensor:
    """A g_idx whose groups fall alike within the query heads of each key/value head."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for head in range(HEADS):
        if head % (HEADS // KV_HEADS) == 0:
            order = torch.randperm(HEAD_DIM, generator=generator)
        labels = torch.randperm(HEAD_DIM // size, generator=generator)
        parts.append(labels[order // size] + head * (HEAD_DIM // size))
    return torch.cat(parts).to(torch.int32)


# --- trivial orders --------------------------------------------------------------------------


def test_a_trivial_order_is_k_over_group_size_and_nothing_else() -> None:
    order = torch.arange(128) // 32
    assert column_order.trivial(order.to(torch.int32), 32)
    assert not column_order.trivial(order, 64)
    assert not column_order.trivial(order.flip(0), 32)
    assert column_order.trivial(torch.zeros(128, dtype=torch.int32), PER_CHANNEL)
    assert column_order.trivial(torch.arange(100) // 32, 32)


@hypothesis_settings(max_examples=30, deadline=None)
@given(
    size=st.sampled_from([16, 32, 64]),
    groups=st.integers(1, 6),
    seed=st.integers(0, 999),
)
def test_an_order_of_whole_groups_goes_without_changing_a_weight(
    size: int, groups: int, seed: int
) -> None:
    blocks = torch.randperm(groups, generator=torch.Generator().manual_seed(seed))
    qweight = made(8, size * groups, size, seed, blocks.repeat_interleave(size).to(torch.int32))
    got = column_order.without_order(qweight)
    assert got.g_idx is None
    assert got.scheme == qweight.scheme
    assert torch.equal(got.dequantize(), qweight.dequantize())


def test_an_order_within_groups_stays() -> None:
    qweight = made(8, 128, 32, 0, shuffled(128, 32, 0))
    assert column_order.without_order(qweight) is qweight


def test_groups_are_cut_to_16_columns_but_no_further() -> None:
    for first, size in ((48, 16), (40, None)):
        g_idx = torch.repeat_interleave(torch.tensor([0, 1]), torch.tensor([first, 128 - first]))
        qweight = made(4, 128, 64, 0, g_idx.to(torch.int32))
        got = column_order.without_order(qweight)
        assert (got.scheme.group_size if got.g_idx is None else None) == size
        assert torch.equal(got.dequantize(), qweight.dequantize())


# --- permuting -------------------------------------------------------------------------------


@hypothesis_settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), size=st.sampled_from([32, PER_CHANNEL]), ordered=st.booleans())
def test_permuted_columns_are_the_same_columns_elsewhere(
    seed: int, size: int, ordered: bool
) -> None:
    qweight = made(8, 96, size, seed, shuffled(96, 32, seed) if ordered and size == 32 else None)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(seed))
    got = column_order.permute_columns(qweight, order)
    assert torch.equal(got.dequantize(), qweight.dequantize()[:, order])
    if size == PER_CHANNEL:
        assert got.g_idx is None


def test_contiguous_order_sorts_an_act_order_away() -> None:
    qweight = made(8, 128, 32, 0, shuffled(128, 32, 3))
    assert qweight.g_idx is not None
    order = column_order.contiguous_order(qweight.g_idx)
    got = column_order.permute_columns(qweight, order)
    assert (got.g_idx, got.scheme.group_size) == (None, 32)
    assert torch.equal(got.dequantize(), qweight.dequantize()[:, order])


def test_permuted_rows_are_the_same_rows_of_integers_floats_and_biases() -> None:
    qweight = made(6, 64, 32, 0, shuffled(64, 32, 0))
    order = torch.tensor([5, 0, 3, 1, 4, 2])
    got = column_order.permute_rows(qweight, order)
    assert torch.equal(got.dequantize(), qweight.dequantize()[order])
    weight, bias = torch.randn(6, 3), torch.randn(6)
    assert torch.equal(column_order.permute_rows(weight, order), weight[order])
    assert torch.equal(column_order.permute_rows(bias, order), bias[order])


@pytest.mark.parametrize("order", [torch.arange(95), torch.zeros(96, dtype=torch.int64), torch.arange(96) + 1])  # fmt: skip
def test_an_order_that_is_no_permutation_is_refused(order: Tensor) -> None:
    with pytest.raises(BadRequest, match="does not name 96 columns once each"):
        column_order.permute_columns(made(8, 96, 32, 0), order)
    with pytest.raises(BadRequest, match="does not name 96 rows once each"):
        column_order.permute_rows(made(96, 32, 32, 0), order)


# --- folding a whole model -------------------------------------------------------------------


def tiny_llama() -> tuple[LlamaForCausalLM, dict[str, QWeight]]:
    """Two layers with random 4-bit weights; down_proj and o_proj have a column order."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
        max_position_embeddings=64, attention_bias=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    weights: dict[str, QWeight] = {}
    for seed, (name, module) in enumerate(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            n, k = module.weight.shape
            g_idx = None
            if name.endswith("down_proj"):
                g_idx = shuffled(k, 64, seed)
            if name.endswith("o_proj"):
                g_idx = within_heads(16, seed)
            weights[name] = made(n, k, 16 if name.endswith("o_proj") else 64, seed, g_idx)
            if module.bias is not None:
                torch.nn.init.normal_(module.bias)
    return model, weights


def logits(model: LlamaForCausalLM, weights: dict[str, QWeight]) -> Tensor:
    with torch.no_grad():
        for name, qweight in weights.items():
            model.get_submodule(name).weight.copy_(qweight.dequantize())
        tokens = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(1))
        return model(tokens).logits


def folded(model: LlamaForCausalLM, weights: dict[str, QWeight]) -> dict[str, QWeight]:
    """Every column order folded into the rows that feed it, biases in `model` included."""
    out = dict(weights)
    for layer in range(2):
        start = f"model.layers.{layer}."
        jobs = (("mlp.down_proj", ("mlp.gate_proj", "mlp.up_proj")),
                ("self_attn.o_proj", ("self_attn.v_proj",)))  # fmt: skip
        for consumer, producers in jobs:
            qweight = out[start + consumer]
            assert qweight.g_idx is not None
            size = qweight.scheme.group_size
            fold = (
                column_order.fold_down_proj(qweight.g_idx, size)
                if consumer.startswith("mlp")
                else column_order.fold_o_proj(qweight.g_idx, size, HEADS, KV_HEADS, HEAD_DIM)
            )
            assert isinstance(fold, Fold)
            out[start + consumer] = column_order.permute_columns(qweight, fold.columns)
            assert out[start + consumer].scheme.group_size == fold.group_size == size
            for producer in producers:
                out[start + producer] = column_order.permute_rows(out[start + producer], fold.rows)
                bias = model.get_submodule(start + producer).bias
                if bias is not None:
                    with torch.no_grad():
                        bias.copy_(column_order.permute_rows(bias.detach(), fold.rows))
    return out


def test_a_folded_model_has_no_column_order_and_the_same_logits() -> None:
    model, weights = tiny_llama()
    before = logits(model, weights)
    assert float(before.std()) > 0.1  # logits that say something
    after_weights = folded(model, weights)
    assert all(qweight.g_idx is None for qweight in after_weights.values())
    after = logits(model, after_weights)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5 * float(before.abs().max()))


@pytest.mark.parametrize("leaf", ["mlp.up_proj", "mlp.gate_proj", "self_attn.v_proj"])
def test_sabotage_a_producer_left_in_its_old_order_changes_the_logits(leaf: str) -> None:
    model, weights = tiny_llama()
    before = logits(model, weights)
    halfway = folded(model, weights)
    halfway[f"model.layers.0.{leaf}"] = weights[f"model.layers.0.{leaf}"]
    assert float((logits(model, halfway) - before).abs().max()) > 0.01 * float(before.std())


def test_sabotage_dropping_the_order_unfolded_changes_the_logits() -> None:
    model, weights = tiny_llama()
    before = logits(model, weights)
    dropped = {name: replace(qweight, g_idx=None) for name, qweight in weights.items()}
    assert float((logits(model, dropped) - before).abs().max()) > 0.01 * float(before.std())


def test_an_o_proj_order_across_heads_is_not_folded_and_says_why() -> None:
    said = column_order.fold_o_proj(shuffled(HIDDEN, 16, 0), 16, HEADS, KV_HEADS, HEAD_DIM)
    assert isinstance(said, str)
    assert "do not fall alike in the 2 query heads" in said
    assert "requantize" in said


def test_an_o_proj_order_that_differs_between_heads_that_share_is_not_folded() -> None:
    alike = within_heads(16, 5)
    fold = column_order.fold_o_proj(alike, 16, HEADS, KV_HEADS, HEAD_DIM)
    assert isinstance(fold, Fold)
    unlike = alike.clone()
    order = torch.randperm(HEAD_DIM, generator=torch.Generator().manual_seed(9))
    unlike[HEAD_DIM : 2 * HEAD_DIM] = unlike[HEAD_DIM : 2 * HEAD_DIM][order]
    assert isinstance(column_order.fold_o_proj(unlike, 16, HEADS, KV_HEADS, HEAD_DIM), str)
    every_head_its_own = column_order.fold_o_proj(unlike, 16, HEADS, HEADS, HEAD_DIM)
    assert isinstance(every_head_its_own, Fold)


def test_groups_of_whole_heads_need_no_order_within_them() -> None:
    g_idx = torch.tensor([1, 0]).repeat_interleave(64)
    fold = column_order.fold_o_proj(g_idx, 64, HEADS, KV_HEADS, HEAD_DIM)
    assert isinstance(fold, Fold)
    assert torch.equal(fold.columns, torch.arange(HIDDEN))
    assert torch.equal(fold.rows, torch.arange(KV_HEADS * HEAD_DIM))


def test_down_proj_groups_of_unequal_size_are_cut_or_refused() -> None:
    g_idx = torch.repeat_interleave(torch.tensor([0, 1]), torch.tensor([96, 32]))
    g_idx = g_idx[torch.randperm(128, generator=torch.Generator().manual_seed(0))]
    fold = column_order.fold_down_proj(g_idx, 64)
    assert isinstance(fold, Fold)
    assert fold.group_size == 32
    qweight = made(4, 128, 64, 0, g_idx.to(torch.int32))
    got = column_order.permute_columns(qweight, fold.columns)
    assert (got.g_idx, got.scheme.group_size) == (None, 32)
    assert torch.equal(got.dequantize(), qweight.dequantize()[:, fold.columns])
    odd = torch.repeat_interleave(torch.tensor([0, 1]), torch.tensor([65, 63]))
    said = column_order.fold_down_proj(odd, 64)
    assert isinstance(said, str)
    assert "unequal size" in said


def test_head_counts_that_do_not_fit_the_columns_are_refused() -> None:
    with pytest.raises(BadRequest, match="128 columns are not 4 query heads of 64"):
        column_order.fold_o_proj(torch.zeros(128), 32, 4, 2, 64)
