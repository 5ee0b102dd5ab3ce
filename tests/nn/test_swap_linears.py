"""Low-bit linears in a built model: replaced, counted, switched and weighed."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from tiny_checkpoint import build_model, logits_of
from weightpath.errors import BadRequest, BadTensor, CannotRun
from weightpath.kernels import cpu
from weightpath.nn.int4_linear import Int4Linear
from weightpath.nn.int8_linear import Int8Linear
from weightpath.nn.swap import (
    explain,
    low_bit_linears,
    quantize_model,
    set_activation_bits,
    set_backend,
    weight_bytes,
)
from weightpath.scheme import INT8, Scheme


def stack(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


# Replacing


def test_every_linear_is_replaced_in_place_and_counted() -> None:
    model = build_model()
    before = linears(model)
    swapped = quantize_model(model, "int8")
    assert len(swapped) == len(before) == 15
    assert set(swapped.replaced) == set(before)
    assert not linears(model)
    assert dict(low_bit_linears(model)).keys() == before.keys()
    assert all(isinstance(module, Int8Linear) for _, module in low_bit_linears(model))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("scheme", "nats"), [("int8", 1e-2), ("w4g64", 1.0)])
def test_a_quantized_decoder_stays_near_the_original_biases_and_all(
    kind: str, scheme: str, nats: float
) -> None:
    model = build_model(kind)
    before = torch.log_softmax(logits_of(model), -1)
    quantize_model(model, scheme)
    after = torch.log_softmax(logits_of(model), -1)
    divergence = (before.exp() * (before - after)).sum(-1).mean()
    assert 0 < float(divergence) < nats


def test_a_tied_head_gets_a_copy_of_its_own_and_the_embedding_keeps_the_original() -> None:
    model = build_model(tied=True)
    table = model.get_input_embeddings().weight
    assert model.lm_head.weight is table
    original = table.detach().clone()
    quantize_model(model, "w4g64", head="int8")
    assert isinstance(model.lm_head, Int8Linear)
    assert model.get_input_embeddings().weight is table
    assert torch.equal(table, original)
    assert model.config.tie_word_embeddings is False
    torch.testing.assert_close(model.lm_head.dequantize(), original, rtol=0, atol=0.004)
    logits = logits_of(model)
    model.tie_weights()  # transformers calls this on its own, when saving say
    assert isinstance(model.lm_head, Int8Linear)
    assert torch.equal(logits_of(model), logits)


def test_the_head_has_a_scheme_of_its_own_or_stays_float_and_tied() -> None:
    model = build_model(tied=True)
    swapped = quantize_model(model, "int8", head=None)
    assert set(swapped.kept) == {"lm_head"}
    assert "head" in swapped.kept["lm_head"]
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.config.tie_word_embeddings is True
    four = build_model()
    assert quantize_model(four, "int8", head="w4g64").replaced["lm_head"] == Scheme(4, 64)
    assert isinstance(four.lm_head, Int4Linear)


def test_a_linear_that_no_group_divides_becomes_int8_and_is_said_so() -> None:
    model = stack(64, 96, 32)
    swapped = quantize_model(model, "w4g64")
    assert swapped.replaced == {"0": Scheme(4, 64), "1": INT8}
    assert isinstance(model[1], Int8Linear)


def test_what_is_named_in_skip_stays_float_and_is_listed() -> None:
    model = stack(8, 8, 8)
    swapped = quantize_model(model, "int8", skip=lambda name: name == "1")
    assert set(swapped.replaced) == {"0"}
    assert set(swapped.kept) == {"1"}
    assert isinstance(model[1], nn.Linear)


def test_a_linear_used_at_two_names_is_replaced_at_both_and_counted_once() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.second = self.first

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    model = Shared()
    assert len(quantize_model(model)) == 1
    assert isinstance(model.first, Int8Linear)
    assert model.second is model.first
    assert len(set_backend(model, "torch")) == 1
    assert model(torch.zeros(2, 8)).shape == (2, 8)


@pytest.mark.parametrize("training", [False, True])
def test_weights_that_torch_reads_past_their_forward_stay_float_and_the_model_runs(
    training: bool,
) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(layer, nn.Linear(16, 16)).train(training)
    x = torch.randn(2, 3, 16)
    before = model(x)
    swapped = quantize_model(model)
    assert set(swapped.replaced) == {"1"}
    assert set(swapped.kept) == {"0.self_attn.out_proj", "0.linear1", "0.linear2"}
    assert swapped.kept["0.self_attn.out_proj"] == "MultiheadAttention reads its weight itself"
    after = model(x)
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, before, rtol=0.05, atol=0.05)


def test_a_subclass_with_a_forward_of_its_own_is_left_alone_and_named() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    class Plain(nn.Linear):
        pass

    model = nn.Sequential(Doubled(4, 4), Plain(4, 4))
    swapped = quantize_model(model)
    assert "Doubled" in swapped.kept["0"]
    assert type(model[0]) is Doubled
    assert isinstance(model[1], Int8Linear)


def test_a_model_that_is_itself_a_linear_cannot_be_replaced_in_place() -> None:
    with pytest.raises(BadRequest, match="from_linear"):
        quantize_model(nn.Linear(4, 4))


@pytest.mark.parametrize("scheme", ["w3g32", "w8g32", "w8-asym", "w8a8", "w5"])
def test_a_scheme_that_modules_do_not_take_is_refused_and_nothing_changes(scheme: str) -> None:
    model = stack(32, 32, 32)
    with pytest.raises(BadRequest, match=scheme):
        quantize_model(model, scheme)
    assert len(linears(model)) == 2


def test_a_nan_is_named_as_the_tensor_it_is_in() -> None:
    model = stack(8, 8, 8)
    with torch.no_grad():
        model[1].weight[2, 3] = math.nan
    with pytest.raises(BadTensor, match=r"tensor 1\.weight: element \[2, 3\] is nan"):
        quantize_model(model)


def test_a_second_pass_finds_nothing_left() -> None:
    model = stack(8, 8, 8)
    assert len(quantize_model(model)) == 2
    assert len(quantize_model(model)) == 0


def test_training_mode_is_kept() -> None:
    model = stack(8, 8, 8).eval()
    quantize_model(model)
    assert not any(module.training for module in model.modules())


# Backends


def test_set_backend_reaches_every_low_bit_linear_and_says_how_many() -> None:
    model = build_model()
    quantize_model(model, "w4g64")
    places = {name: next(module.buffers()).data_ptr() for name, module in low_bit_linears(model)}
    assert len(set_backend(model, "torch")) == 15
    assert {module.backend for _, module in low_bit_linears(model)} == {"torch"}
    for name, module in low_bit_linears(model):
        assert next(module.buffers()).data_ptr() == places[name]
    assert len(set_backend(stack(4, 4), "torch")) == 0


def test_set_backend_repacks_what_another_kernel_reads_otherwise_and_says_so() -> None:
    model = build_model()
    quantize_model(model, "w4g64")
    x, held = torch.arange(12)[None], weight_bytes(model)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    switched = set_backend(model, None)
    assert set(switched.kernels.values()) == {"cpu"}
    assert set(switched.repacked.values()) == {"plain codes to CPU tiles"}
    assert len(switched.repacked) == 15
    assert set_backend(model, "cpu").repacked == {}
    assert {module.backend for _, module in low_bit_linears(model)} == {"cpu"}
    assert weight_bytes(model).matmul == held.matmul  # codes are held once
    compiled = model(x).logits
    back = set_backend(model, "torch")
    assert set(back.repacked.values()) == {"CPU tiles to plain codes"}
    assert model.state_dict().keys() == saved.keys()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in saved.items())
    assert not torch.equal(model(x).logits, compiled)
    torch.testing.assert_close(model(x).logits, compiled, rtol=0, atol=1e-3)


def test_set_backend_changes_all_or_nothing() -> None:
    model = stack(8, 8, 8, 8)
    quantize_model(model)
    model[0].set_backend("torch")
    model[2].scheme = Scheme(8, 3)  # no kernel takes groups of 3 columns out of 8
    with pytest.raises(CannotRun, match="3 does not divide"):
        set_backend(model, "torch")
    assert [module.backend for _, module in low_bit_linears(model)] == ["torch", None, None]


def test_triton_on_the_cpu_is_an_error_that_says_why_and_changes_nothing() -> None:
    model = stack(8, 8, 8)
    quantize_model(model)
    with pytest.raises(CannotRun, match=r"Triton kernels run on CUDA; this layer is on cpu"):
        set_backend(model, "triton")
    assert {module.backend for _, module in low_bit_linears(model)} == {None}


def test_explain_gives_every_kernel_and_every_rejection() -> None:
    model = stack(64, 64, 96, 64)
    quantize_model(model, "w4g64")
    report = explain(model)
    assert {name: row["scheme"] for name, row in report.items()} == {
        "0": "w4g64",
        "1": "w4g64",
        "2": "w8",
    }
    for row in report.values():
        assert row["kernel"] == "cpu"
        rejected = [name for name, _ in row["rejected"]]
        assert rejected[:2] == ["cuda", "triton"]
        sets = list(cpu.instruction_sets())
        assert str(row["instruction_set"]).startswith(cpu.chosen_instruction_set())
        assert rejected[2:] == sets[: len(rejected) - 2]
        assert all(cpu.instruction_sets()[name] for name in rejected[2:])


def test_activation_bits_reach_the_4_bit_linears_only_and_are_counted() -> None:
    model = stack(64, 64, 96, 64)
    quantize_model(model, "w4g64")
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    sixteen = model(x)
    assert set_activation_bits(model, 8) == 2
    assert not torch.equal(model(x), sixteen)
    assert set_activation_bits(model, 16) == 2
    assert torch.equal(model(x), sixteen)
    with pytest.raises(BadRequest, match="4-bit activations"):
        set_activation_bits(model, 4)


# Bytes


def test_weight_bytes_split_into_what_is_read_whole_looked_up_and_the_rest() -> None:
    model = build_model()  # hidden 64, intermediate 128, vocabulary 128, kv 32, 2 layers
    matmul = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128) + 128 * 64
    size = weight_bytes(model)
    assert size.matmul == 4 * matmul
    assert size.embedding == 4 * 128 * 64
    assert size.rest == 4 * 5 * 64  # norms; the rotary table is not a weight
    assert size.total == size.matmul + size.embedding + size.rest
    assert size.total == 4 * sum(p.numel() for p in model.parameters())


def test_a_tied_matrix_counts_once_under_matmul() -> None:
    tied, untied = weight_bytes(build_model(tied=True)), weight_bytes(build_model())
    assert tied.embedding == 0
    assert tied.matmul == untied.matmul
    assert tied.total == untied.total - untied.embedding


def test_an_untied_int8_head_is_read_whole_and_the_embedding_becomes_a_lookup() -> None:
    model = build_model(tied=True)
    quantize_model(model, "int8")
    size = weight_bytes(model)
    rows = 2 * (64 + 32 + 32 + 64 + 128 + 128 + 64) + 128  # out_features of every linear
    weights = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128) + 128 * 64
    assert size.matmul == weights + 4 * rows
    assert size.embedding == 4 * 128 * 64
    assert size.rest == 4 * 5 * 64


def test_floats_can_be_counted_at_another_width_and_codes_and_scales_stay_as_stored() -> None:
    model = build_model("qwen2")
    before, half = weight_bytes(model), weight_bytes(model, float_bytes=2)
    assert (half.matmul * 2, half.embedding * 2, half.rest * 2) == (
        before.matmul, before.embedding, before.rest,
    )  # fmt: skip
    quantize_model(model, "int8")
    whole, narrow = weight_bytes(model), weight_bytes(model, float_bytes=2)
    assert narrow.matmul == whole.matmul
    assert narrow.embedding * 2 == whole.embedding
    assert narrow.rest * 2 == whole.rest  # norms and biases


def test_4_bit_linears_count_their_packed_codes_scales_and_zeros() -> None:
    model = stack(64, 32)
    quantize_model(model, "w4g32-asym")
    size = weight_bytes(model)
    assert size.matmul == 32 * 32 + 32 * 2 * 2 + 32 * 2  # codes, bf16 scales, zeros in a byte
    assert size.rest == 32 * 4
    assert size.embedding == 0


def test_saved_buffers_count_and_others_do_not() -> None:
    model = nn.Module()
    model.register_buffer("mean", torch.zeros(10))
    model.register_buffer("table", torch.zeros(1000), persistent=False)
    model.register_buffer("none", None)
    model.scale = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    assert weight_bytes(model).rest == 46
    assert weight_bytes(model, float_bytes=1).rest == 13
