"""The graph engine on a GPU: captured steps against eager ones and against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from native_models import some_ids, wanted_logits

from tiny_checkpoint import build_model, prompt_ids
from weightpath.engine import graph
from weightpath.engine.graph import GraphModel
from weightpath.engine.load import load
from weightpath.engine.session import engine_of
from weightpath.kernels import step
from weightpath.nn.swap import quantize_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 128, "hidden_size": 256, "num_attention_heads": 4}),
    "mistral with a window": ("mistral", {"sliding_window": 40, "head_dim": 64}),
    "qwen2 tied": ("qwen2", {"tied": True, "head_dim": 32}),
    "qwen3": ("qwen3", {"head_dim": 128}),
}
PROMPT, STEPS = 50, 30


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def overlap(request: pytest.FixtureRequest) -> bool:
    """Programmatic dependent launch, where the GPU has it."""
    reason = step.overlap_refusal(torch.device("cuda"), "triton") if request.param else None
    if reason is not None:
        pytest.skip(reason)
    return request.param


def moved(model: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model on the GPU in `dtype`, its rotary frequencies not rounded."""
    model = model.to("cuda", dtype)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to("cuda")
    return model


def on_cuda(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    kind, changes = KINDS[name]
    return moved(build_model(kind, **changes), dtype)


def stepped(engine: GraphModel, ids: list[int]) -> torch.Tensor:
    """Logits [STEPS, vocabulary] of the tokens after a prompt, one step each."""
    session = engine.session(200)
    session.extend(ids[:PROMPT])
    return torch.stack([session.extend([token]).clone() for token in ids[PROMPT:]])


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", KINDS)
def test_captured_steps_are_as_near_to_fp32_as_transformers_in_bf16(name: str) -> None:
    model, ids = on_cuda(name), some_ids(PROMPT + STEPS)
    kind, changes = KINDS[name]
    exact = build_model(kind, **changes)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16())
        theirs = model(torch.tensor([ids], device="cuda")).logits[0].float().cpu()[PROMPT:]
    wanted = wanted_logits(exact, ids)[PROMPT:]
    found = stepped(GraphModel.of(model), ids)
    assert off(found, wanted) < 2 * off(theirs, wanted) + 1e-3


@pytest.mark.parametrize("name", KINDS)
def test_captured_steps_in_fp32_give_the_logits_of_transformers(name: str) -> None:
    ids = some_ids(PROMPT + STEPS)
    kind, changes = KINDS[name]
    wanted = wanted_logits(build_model(kind, **changes), ids)[PROMPT:]
    assert off(stepped(GraphModel.of(on_cuda(name, torch.float32)), ids), wanted) < 1e-4


@pytest.mark.parametrize("name", KINDS)
def test_a_replay_gives_the_bits_of_the_eager_step_and_of_itself(name: str, overlap: bool) -> None:
    model, ids = on_cuda(name), some_ids(PROMPT + STEPS)
    captured = GraphModel.of(model, overlap=overlap)
    eager = GraphModel.of(model, capture=False)
    found = stepped(captured, ids)
    assert torch.equal(found, stepped(eager, ids))
    assert torch.equal(found, stepped(captured, ids))
    prompts = [ids[:9], ids[:20], ids[5:40]]
    replies = captured.greedy(prompts, 40)
    assert replies == eager.greedy(prompts, 40) == captured.greedy(prompts, 40)


def test_rows_at_their_own_lengths_in_a_padded_step_agree_with_rows_alone() -> None:
    engine = GraphModel.of(on_cuda("llama", torch.float32))
    texts = [some_ids(length, seed=length) for length in (3, 90, 17)]
    alone = []
    for text in texts:
        session = engine.session(100)
        session.extend(text[:-1])
        alone.append(session.extend(text[-1:]).clone())
    sessions = [engine.session(100) for _ in texts]
    for session, text in zip(sessions, texts, strict=True):
        session.extend(text[:-1])
    found = engine.extend_many(sessions, [text[-1] for text in texts])
    assert off(found, torch.stack(alone)) < 1e-5


def test_a_captured_step_follows_a_cache_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "FIRST_CAPACITY", 16)
    model, ids = on_cuda("qwen3", torch.float32), some_ids(80)
    session = GraphModel.of(model).session(80)
    for token in ids[:-1]:
        session.extend([token])
    wanted = wanted_logits(build_model("qwen3", head_dim=128), ids)[-1]
    assert off(session.extend(ids[-1:]), wanted) < 1e-4


@pytest.mark.parametrize("scheme", ["int8", "w4g32", "w4g32-asym"])
def test_low_bit_steps_agree_with_the_same_modules_in_transformers(scheme: str) -> None:
    ids = some_ids(PROMPT + STEPS)
    model = build_model("llama", head_dim=64)
    quantize_model(model, scheme)
    model = moved(model)
    with torch.no_grad():
        theirs = model(torch.tensor([ids], device="cuda")).logits[0].float().cpu()[PROMPT:]
    assert off(stepped(GraphModel.of(model), ids), theirs) < 0.03


def test_load_takes_the_graph_engine_on_cuda_by_itself(tiny_low_bit: Path) -> None:
    model = load(tiny_low_bit, device="cuda", engine="auto")
    engine = engine_of(model)
    assert isinstance(engine, GraphModel)
    assert engine.capture
    ids = prompt_ids(6).cuda()
    found = model.generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(found, model.generate(ids, max_new_tokens=20, do_sample=False))
    assert found.device.type == "cuda"
    drawn = [model.generate(ids, max_new_tokens=8, do_sample=True, seed=3) for _ in range(2)]
    assert torch.equal(drawn[0], drawn[1])
