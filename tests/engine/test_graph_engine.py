"""Sessions, batches and low-bit weights on the graph engine, on the CPU (plain torch, no capture)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from native_models import family, some_ids, wanted_logits
from torch import nn

import weightpath
from tiny_checkpoint import build_model, logits_of, prompt_ids
from weightpath.engine import graph
from weightpath.engine.batch import generate_many
from weightpath.engine.graph import GraphModel
from weightpath.engine.load import load
from weightpath.engine.session import engine_of, open_session
from weightpath.errors import BadRequest, CannotRun
from weightpath.nn.gathered_linear import GatheredLinear
from weightpath.nn.joined_linear import JoinedLinear
from weightpath.nn.swap import explain, quantize_model, weight_bytes

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = prompt_ids(6)


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((found - wanted).abs().max() < 1e-4 * wanted.abs().max())


def test_rows_of_a_step_each_stand_at_their_own_length() -> None:
    model = family("mistral-window")
    engine = GraphModel.of(model)
    texts = [some_ids(length, seed=length) for length in (3, 50, 17)]
    sessions = [engine.session() for _ in texts]
    for session, text in zip(sessions, texts, strict=True):
        session.extend(text[:-1])
    found = engine.extend_many(sessions, [text[-1] for text in texts])
    for row, session, text in zip(found, sessions, texts, strict=True):
        assert close(row, wanted_logits(model, text)[-1])
        assert session.tokens == text


def test_more_rows_than_a_step_takes_are_run_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "MOST_ROWS", 2)
    model = family("llama")
    engine = GraphModel.of(model)
    sessions = [engine.session() for _ in range(5)]
    ids = some_ids(5)
    found = engine.extend_many(sessions, ids)
    for row, token in zip(found, ids, strict=True):
        assert close(row, wanted_logits(model, [token])[0])


def test_a_cache_grows_as_it_fills_and_a_truncated_session_goes_on_as_a_fresh_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graph, "FIRST_CAPACITY", 8)
    monkeypatch.setattr(graph, "FIRST_TABLES", 16)
    model, ids = family("qwen3"), some_ids(60)
    session = GraphModel.of(model).session(context=60)
    assert session.cache.shape[3] == 8
    for token in ids[:20]:
        session.extend([token])
    assert session.cache.shape[3] == 32
    session.extend(ids[20:])
    assert session.cache.shape[3] == 60
    session.truncate(25)
    assert close(session.extend(ids[25:40]), wanted_logits(model, ids[:40])[-1])
    with pytest.raises(BadRequest, match="beyond the context of 60"):
        session.extend(ids[:21])


def test_a_long_prompt_runs_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "CHUNK", 16)
    model, ids = family("mistral-window"), some_ids(70)
    assert close(GraphModel.of(model).session().all_logits(ids), wanted_logits(model, ids))


def test_greedy_replies_do_not_depend_on_what_runs_beside_them_and_end_at_a_stop() -> None:
    model = family("llama")
    engine = GraphModel.of(model)
    prompts = [some_ids(length, seed=length) for length in (4, 9, 2, 30, 7)]
    alone = [engine.greedy([prompt], 40)[0] for prompt in prompts]
    assert engine.greedy(prompts, 40, at_once=3) == alone
    by_sessions = generate_many(engine, None, prompts, at_once=2)
    assert [[t.token for t in one.tokens][:40] for one in by_sessions] == alone
    stop = alone[0][20]
    cut = [one[: one.index(stop) + 1] if stop in one else one for one in alone]
    assert cut != alone
    assert engine.greedy(prompts, 40, [stop], at_once=2) == cut


def test_logits_that_are_not_finite_are_an_error_on_either_way() -> None:
    model = build_model("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight[5, 3] = float("inf")  # type: ignore[union-attr, operator, index]
    engine = GraphModel.of(model)
    with pytest.raises(CannotRun, match="logits are not finite"):
        engine.greedy([[1, 2, 3]], 5)
    session = engine.session()
    session.extend([1, 2, 3])
    with torch.inference_mode():
        runner = engine.loaded([session], [4], 1)
        runner.run()
    assert runner.bad.tolist() == [1]


@pytest.mark.parametrize("scheme", ["int8", "w4g32", "w4g16-asym"])
def test_low_bit_linears_of_one_input_become_one_with_the_same_result(scheme: str) -> None:
    model = build_model("qwen2")
    quantize_model(model, scheme, head="int8")
    wanted, before = wanted_logits(model, some_ids(40)), weight_bytes(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    engine = GraphModel.of(model)
    layer = engine.weights.layers[0]
    assert (len(layer.qkv), len(layer.gate_up)) == (1, 1)
    assert close(engine.session().all_logits(some_ids(40)), wanted)
    assert close(wanted_logits(model, some_ids(40)), wanted)
    assert weight_bytes(model) == before
    assert model.state_dict().keys() == state.keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert {row["scheme"] for row in explain(model).values()} >= {layer.qkv[0].scheme.name}  # type: ignore[union-attr]
    again = GraphModel.of(model)
    assert again.weights.layers[0].qkv[0] is layer.qkv[0]


@pytest.mark.parametrize("same", [True, False])
def test_linears_behind_one_gather_are_joined_behind_it_and_others_stay_apart(same: bool) -> None:
    model = build_model("llama")
    quantize_model(model, "w4g32")
    generator = torch.Generator().manual_seed(3)
    order, scales = torch.randperm(64, generator=generator), torch.rand(64, generator=generator) + 1
    attention: Any = model.model.layers[0].self_attn  # type: ignore[union-attr, index]
    for name in ("q_proj", "k_proj", "v_proj"):
        mine = order.clone() if same or name != "v_proj" else order.flip(0)
        setattr(attention, name, GatheredLinear(getattr(attention, name), mine, scales.clone()))
    wanted = wanted_logits(model, some_ids(40))
    for _ in range(2):
        engine = GraphModel.of(model)
        assert len(engine.weights.layers[0].qkv) == (1 if same else 3)
        assert close(engine.session().all_logits(some_ids(40)), wanted)
    assert close(wanted_logits(model, some_ids(40)), wanted)


def test_linears_of_different_schemes_stay_apart() -> None:
    model = build_model("llama")
    quantize_model(model, "w4g32", head=None, skip=lambda name: name.endswith("v_proj"))
    wanted = wanted_logits(model, some_ids(40))
    engine = GraphModel.of(model)
    assert len(engine.weights.layers[0].qkv) == 3
    assert len(engine.weights.layers[0].gate_up) == 1
    assert close(engine.session().all_logits(some_ids(40)), wanted)


def test_floats_that_were_joined_are_in_memory_once() -> None:
    model = build_model("llama")
    engine = GraphModel.of(model)
    attention: Any = model.model.layers[0].self_attn  # type: ignore[union-attr, index]
    whole: Any = engine.weights.layers[0].qkv[0]
    for module in (attention.q_proj, attention.k_proj, attention.v_proj):
        assert type(module) is nn.Linear
        assert (
            module.weight.untyped_storage().data_ptr() == whole.weight.untyped_storage().data_ptr()
        )


def test_load_puts_the_graph_engine_beside_a_model_by_name(tiny_low_bit: Path) -> None:
    model, plain = load(tiny_low_bit, engine="graph"), load(tiny_low_bit)
    assert isinstance(engine_of(model), GraphModel)
    found, wanted = open_session(model).extend(IDS[0].tolist()), logits_of(plain, 6)[-1]
    assert float((found - wanted).norm() / wanted.norm()) < 0.03  # both round to bf16 on the way
    ids = model.generate(IDS, max_new_tokens=5, do_sample=False)
    assert ids.shape == (1, 11)
    assert torch.equal(ids[:, :6], IDS)
    drawn = [model.generate(IDS, max_new_tokens=8, do_sample=True, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    with pytest.raises(BadRequest, match="num_beams=4 is not done by this engine"):
        model.generate(IDS, num_beams=4)
    assert model.weightpath.explain() == plain.weightpath.explain()  # type: ignore[union-attr]


def test_a_graph_cannot_be_captured_on_the_cpu_and_a_model_it_does_not_take_is_refused(
    tmp_path: Path, tiny_llama: Path
) -> None:
    with pytest.raises(CannotRun, match="this model is on cpu"):
        GraphModel.of(build_model("llama"), capture=True)
    with pytest.raises(CannotRun, match="Triton kernels run on CUDA; this layer is on cpu"):
        GraphModel.of(build_model("llama"), kernels="triton")
    with pytest.raises(CannotRun, match="overlap is of Triton kernels on CUDA, not of plain ones"):
        GraphModel.of(build_model("llama"), overlap=True)
    with pytest.raises(BadRequest, match="step kernels 'fast': unknown; there are triton, plain"):
        GraphModel.of(build_model("llama"), kernels="fast")
    weightpath.quantize(tiny_llama, tmp_path / "low", scheme="w4g64")
    config = tmp_path / "low" / "config.json"
    config.write_text(config.read_text().replace('"silu"', '"gelu"'))
    with pytest.raises(CannotRun, match="the graph engine does not run it: its activation is gelu"):
        load(tmp_path / "low", engine="graph")


def test_a_joined_linear_alone_gives_its_own_columns() -> None:
    model = build_model("llama")
    quantize_model(model, "int8")
    attention: Any = model.model.layers[0].self_attn  # type: ignore[union-attr, index]
    x = torch.randn(3, 64)
    wanted = attention.k_proj(x)
    GraphModel.of(model)
    assert isinstance(attention.k_proj, JoinedLinear)
    assert close(attention.k_proj(x), wanted)
