"""load(engine=...): the native engine beside a model, and what is said where it cannot be had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import weightpath
from tiny_checkpoint import logits_of, make_checkpoint, prompt_ids, tokenizer_of
from weightpath.engine.decode import NativeModel
from weightpath.engine.load import load
from weightpath.engine.session import TransformersEngine, engine_of, open_session
from weightpath.errors import BadRequest, CannotRun
from weightpath.fidelity.greedy import greedy_agreement, prompt_tokens
from weightpath.nn.swap import low_bit_linears

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = prompt_ids(6)


def about(model: Any) -> Any:
    return model.weightpath


@pytest.mark.parametrize("engine", ["native", "auto"])
def test_the_native_engine_is_used_by_sessions_and_generate(
    tiny_low_bit: Path, engine: str
) -> None:
    model, plain = load(tiny_low_bit, engine=engine), load(tiny_low_bit)
    assert isinstance(engine_of(model), NativeModel)
    assert isinstance(engine_of(plain), TransformersEngine)
    native, wanted = open_session(model, 64).extend(IDS[0].tolist()), logits_of(plain, 6)[-1]
    assert float((native - wanted).norm() / wanted.norm()) < 0.03  # both round to bf16 on the way
    ids = model.generate(IDS, max_new_tokens=5, do_sample=False)
    assert ids.shape == (1, 11)
    assert torch.equal(ids[:, :6], IDS)
    with pytest.raises(BadRequest, match="num_beams=4 is not done by this engine"):
        model.generate(IDS, num_beams=4)


def test_generate_follows_the_models_generation_config_as_it_is_at_the_call(
    tiny_low_bit: Path,
) -> None:
    model = load(tiny_low_bit, engine="native")
    before = model.generate(IDS, max_new_tokens=8, do_sample=False)[0, 6:].tolist()
    model.generation_config.eos_token_id = before[2]  # type: ignore[union-attr]
    after = model.generate(IDS, max_new_tokens=8, do_sample=False)[0, 6:].tolist()
    assert after == before[: before.index(before[2]) + 1]


def test_greedy_texts_are_the_native_engines_own_without_the_files_penalty(
    tiny_low_bit: Path,
) -> None:
    model, tokenizer = load(tiny_low_bit, engine="native"), tokenizer_of(tiny_low_bit)
    model.generation_config.repetition_penalty = 1.7  # type: ignore[union-attr]
    written = greedy_agreement(model, model, tokenizer, max_new_tokens=12, method="generate")
    read = greedy_agreement(model, model, tokenizer, max_new_tokens=12)
    assert written.k == written.n == read.k
    ids = prompt_tokens(tokenizer, written.prompts[0].prompt)
    session, text = open_session(model, 256), []
    logits = session.extend(ids.tolist())
    while len(text) < written.prompts[0].length:
        text.append(int(logits.argmax()))
        logits = session.extend(text[-1:])
    assert tokenizer.decode(text) == written.prompts[0].reference_text


def test_weights_of_a_native_model_are_in_memory_once_and_the_modules_still_run(
    tiny_low_bit: Path,
) -> None:
    model, plain = load(tiny_low_bit, engine="native"), load(tiny_low_bit)
    engine: Any = engine_of(model)
    kept = {values.untyped_storage().data_ptr() for values in engine._weights.kept}
    for name, module in low_bit_linears(model):
        assert module.tiles.untyped_storage().data_ptr() in kept, name
    assert torch.equal(logits_of(model), logits_of(plain))
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert about(model).explain() == about(plain).explain()


def test_where_the_native_engine_does_not_take_a_model_auto_says_so_and_native_refuses(
    tmp_path: Path,
) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen2")
    weightpath.quantize(source, tmp_path / "low", scheme="w4g64")
    config = tmp_path / "low" / "config.json"
    config.write_text(config.read_text().replace('"silu"', '"gelu"'))
    model = load(tmp_path / "low", engine="auto")
    assert isinstance(engine_of(model), TransformersEngine)
    assert about(model).notes[-1] == (
        "runs on transformers' modules, not on the native engine: its activation is gelu; the "
        "native engine has silu"
    )
    assert model.generate(IDS, max_new_tokens=2).shape == (1, 8)
    with pytest.raises(
        CannotRun, match="the native engine does not run it: its activation is gelu"
    ):
        load(tmp_path / "low", engine="native")


def test_unknown_engines_and_a_kernel_beside_the_native_one_are_refused(tiny_low_bit: Path) -> None:
    with pytest.raises(
        BadRequest, match="engine 'fast': unknown; use transformers, native, graph, auto"
    ):
        load(tiny_low_bit, engine="fast")
    with pytest.raises(BadRequest, match="leave one of them out"):
        load(tiny_low_bit, engine="native", backend="torch")
    assert about(load(tiny_low_bit, engine="auto", backend="torch")).native is None
    with pytest.raises(BadRequest, match="cache 'int2': unknown; there are bf16, int8, fp32"):
        load(tiny_low_bit, engine="native", kv_cache="int2")
    with pytest.raises(BadRequest, match="kv_cache int8 is the native engine's"):
        load(tiny_low_bit, kv_cache="int8")


def test_keys_and_values_are_kept_as_asked(tiny_low_bit: Path) -> None:
    bf16, int8 = (
        engine_of(load(tiny_low_bit, engine="native", kv_cache=kind)) for kind in ("bf16", "int8")
    )
    assert isinstance(bf16, NativeModel)
    assert isinstance(int8, NativeModel)
    assert int8.cache_bytes(1024) < bf16.cache_bytes(1024)
    ids = IDS[0].tolist()
    found, wanted = int8.session(64).extend(ids), bf16.session(64).extend(ids)
    assert 0 < float((found - wanted).norm() / wanted.norm()) < 0.05


def test_8_bit_activations_reach_the_native_engine(tiny_llama: Path, tmp_path: Path) -> None:
    weightpath.quantize(tiny_llama, tmp_path / "a8", scheme="w4a8g64")
    ids = IDS[0].tolist()
    eight = open_session(load(tmp_path / "a8", engine="native")).extend(ids)
    sixteen = open_session(load(tmp_path / "a8", engine="native", activation_bits=16)).extend(ids)
    wanted = logits_of(load(tmp_path / "a8"), 6)[-1]
    assert not torch.equal(eight, sixteen)
    assert float((eight - wanted).norm() / wanted.norm()) < 0.05
