"""verify on tiny models: its figures repeat, tell more loss from less, and say what was done."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import weightpath
from tiny_checkpoint import edit_tensors, make_checkpoint, tokenizer_of
from weightpath.engine.decode import NativeModel
from weightpath.errors import BadCheckpoint, BadRequest, CannotRun, WeightpathError
from weightpath.fidelity.greedy import MINIMUM_PROMPTS, prompt_tokens
from weightpath.jobs.verify import Verification, VerifyOptions, compute_dtype

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight documents of a thousand characters, one a token."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    rows = [f"# file: {i}\n" + f"The {i} cats sat on mat {i * i}. " * 40 + "\n" for i in range(8)]
    path.write_text("".join(rows))
    return path


def options(file: Path, **changes: Any) -> VerifyOptions:
    return VerifyOptions(
        **{"text": file, "length": 96, "limit": 6, "prompt_tokens": 6, "floor_windows": 2} | changes
    )


def verified(low: Path, source: Path, file: Path, **changes: Any) -> Verification:
    return weightpath.verify(low, source, options(file, **changes))


def test_the_figures_are_the_same_every_time(
    tiny_low_bit: Path, tiny_llama: Path, text: Path
) -> None:
    first, second = (verified(tiny_low_bit, tiny_llama, text).to_dict() for _ in range(2))
    assert first == second


def test_int8_loses_less_than_4_bits_and_both_lose_something(
    tiny_llama: Path, tiny_low_bit: Path, tmp_path: Path, text: Path
) -> None:
    weightpath.quantize(tiny_llama, tmp_path / "int8", scheme="int8")
    eight = verified(tmp_path / "int8", tiny_llama, text)
    four = verified(tiny_low_bit, tiny_llama, text)
    assert 0 < eight.fidelity.mean_kl.high < four.fidelity.mean_kl.low
    assert eight.fidelity.top1.value > four.fidelity.top1.value
    assert eight.greedy.k >= four.greedy.k
    assert eight.fidelity.perplexity_reference == four.fidelity.perplexity_reference


def test_weights_on_the_grid_lose_nothing_at_all(tmp_path: Path, text: Path) -> None:
    """A source whose weights are already codes times a power of two comes through exactly."""

    def on_grid(tensors: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(1)
        for name, value in tensors.items():
            if "proj" in name:
                codes = torch.randint(-8, 8, value.shape, generator=generator)
                codes[:, ::32], codes[:, 1::32] = -8, 7  # the whole range in every group
                tensors[name] = (codes * 2.0**-5).to(value.dtype)

    source = edit_tensors(make_checkpoint(tmp_path / "source"), on_grid)
    done = weightpath.quantize(source, tmp_path / "low", scheme="w4g32-asym", head_bits=16)
    assert done.total.squared_error == 0
    found = verified(tmp_path / "low", source, text, backend="torch")
    assert found.fidelity.mean_kl.value == 0
    assert found.fidelity.top1.value == 1
    assert found.fidelity.perplexity_ratio.value == 1
    assert found.greedy.k == found.greedy.n
    compiled = verified(tmp_path / "low", source, text, engine="transformers")
    assert 0 < compiled.fidelity.mean_kl.value < 1e-7  # rounds activations to 16 bits
    native = verified(tmp_path / "low", source, text)  # keys and values to bf16 too
    assert compiled.fidelity.mean_kl.value < native.fidelity.mean_kl.value < 1e-4
    wider = verified(tmp_path / "low", source, text, engine="native", kv_cache="fp32")
    assert wider.fidelity.mean_kl.value < native.fidelity.mean_kl.value
    eight = verified(tmp_path / "low", source, text, engine="native", kv_cache="int8")
    assert native.fidelity.mean_kl.value < eight.fidelity.mean_kl.value < 1e-3


def test_the_reference_is_the_models_own_bf16_whatever_it_is_stored_in(
    tmp_path: Path, text: Path
) -> None:
    wide = make_checkpoint(tmp_path / "wide", dtype=torch.float32)
    narrow = make_checkpoint(tmp_path / "narrow", dtype=torch.bfloat16)
    weightpath.quantize(narrow, tmp_path / "low", scheme="int8")
    first, second = (
        verified(tmp_path / "low", source, text).to_dict() for source in (wide, narrow)
    )
    assert first == second


def test_the_result_says_what_was_measured(
    tiny_low_bit: Path, tiny_llama: Path, text: Path
) -> None:
    found = verified(tiny_low_bit, tiny_llama, text)
    assert "text.txt: 8 documents by '# file:' lines; 6 windows of up to 96 tokens" in found.text
    assert found.compute == "float32"
    assert found.activation_bits == 16
    assert found.fidelity.tokens == 6 * 95
    assert found.noise_floor.mean_kl.value < 1e-6 < found.fidelity.mean_kl.value
    assert found.greedy.n >= MINIMUM_PROMPTS
    assert found.greedy.max_new_tokens == 6
    for interval in (found.fidelity.mean_kl, found.fidelity.top1, found.greedy.equal):
        assert interval.low <= interval.value <= interval.high
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["fidelity"]["mean_kl"]["value"] == found.fidelity.mean_kl.value
    assert len(plain["greedy"]["prompts"]) == found.greedy.n


def test_bf16_arithmetic_and_int8_activations_are_named(
    tiny_low_bit: Path, tiny_llama: Path, text: Path
) -> None:
    found = verified(tiny_low_bit, tiny_llama, text, compute="bfloat16", activation_bits=8)
    assert (found.compute, found.activation_bits) == ("bfloat16", 8)
    plain = verified(tiny_low_bit, tiny_llama, text, compute="bfloat16")
    assert found.fidelity.mean_kl != plain.fidelity.mean_kl


@pytest.mark.parametrize(
    ("asked", "ran"),
    [
        ({}, ("native", "bf16")),
        ({"engine": "native", "kv_cache": "int8"}, ("native", "int8")),
        ({"engine": "transformers"}, ("transformers", None)),
        ({"backend": "torch"}, ("transformers", None)),
    ],
    ids=str,
)
def test_the_engine_that_ran_is_named_and_without_a_wish_it_is_the_one_that_run_takes(
    tiny_low_bit: Path,
    tiny_llama: Path,
    text: Path,
    asked: dict[str, Any],
    ran: tuple[str, str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = 0
    own = NativeModel.step

    def counted(self: NativeModel, tokens: list[int], *rest: Any) -> None:
        nonlocal rows
        rows += len(tokens)
        own(self, tokens, *rest)

    monkeypatch.setattr(NativeModel, "step", counted)
    found = verified(tiny_low_bit, tiny_llama, text, **asked)
    assert (found.engine, found.kv_cache) == ran
    assert (found.to_dict()["engine"], found.to_dict()["kv_cache"]) == ran
    read = 6 * 96 + sum(
        len(prompt_tokens(tokenizer_of(tiny_low_bit), row.prompt)) + row.length - 1
        for row in found.greedy.prompts
    )
    assert rows == (read if ran[0] == "native" else 0)


def test_where_the_native_engine_does_not_take_a_model_the_notes_say_so(
    tiny_llama: Path, text: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(tiny_llama, tmp_path / "source"))
    config = source / "config.json"
    config.write_text(config.read_text().replace('"silu"', '"gelu"'))
    weightpath.quantize(source, tmp_path / "low", scheme="int8")
    found = verified(tmp_path / "low", source, text)
    assert found.engine == "transformers"
    assert found.kv_cache is None
    assert "not on the native engine: its activation is gelu" in found.notes[-1]
    wanted = verified(tmp_path / "low", source, text, engine="transformers")
    assert found.fidelity == wanted.fidelity
    with pytest.raises(CannotRun, match="its activation is gelu"):
        verified(tmp_path / "low", source, text, engine="native")


def test_the_folders_own_tokenizer_is_used_and_else_the_references(
    tiny_low_bit: Path, tiny_llama: Path, tmp_path: Path, text: Path
) -> None:
    bare = Path(shutil.copytree(tiny_low_bit, tmp_path / "bare"))
    for file in bare.glob("tokenizer*"):
        file.unlink()
    wanted = verified(tiny_low_bit, tiny_llama, text).fidelity
    assert verified(bare, tiny_llama, text).fidelity == wanted
    with pytest.raises(BadCheckpoint, match="no tokenizer that loads"):
        weightpath.verify(bare, make_checkpoint(tmp_path / "none", chat=None), options(text))


def test_the_default_text_comes_with_python(tiny_low_bit: Path, tiny_llama: Path) -> None:
    found = weightpath.verify(
        tiny_low_bit,
        tiny_llama,
        VerifyOptions(length=64, limit=2, prompt_tokens=2, floor_windows=2),
    )
    assert "language reference" in found.text


def test_progress_tells_every_part(tiny_low_bit: Path, tiny_llama: Path, text: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    weightpath.verify(
        tiny_low_bit, tiny_llama, options(text), progress=lambda *step: seen.append(step)
    )
    labels = list(dict.fromkeys(label for label, _, _ in seen))
    assert labels == ["loading", "comparing logits", "noise floor", "greedy prompts"]
    for label in labels:
        assert [s for s in seen if s[0] == label][-1][1:] == (
            [s for s in seen if s[0] == label][-1][2],
        ) * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compute": "int8"}, "compute 'int8': use float32 or bfloat16"),
        ({"compute": "float16"}, "compute 'float16'"),
        ({"text": Path("/nowhere/text.txt")}, "text file /nowhere/text.txt"),
        ({"prompts": Path("/nowhere/prompts.json")}, "prompts /nowhere/prompts.json"),
        ({"activation_bits": 3}, "3-bit activations"),
        ({"device": "abacus"}, "device 'abacus'"),
        ({"backend": "abacus"}, "backend 'abacus'"),
        ({"engine": "abacus"}, "engine 'abacus': unknown"),
        ({"engine": "native", "backend": "torch"}, "leave one of them out"),
        ({"engine": "native", "kv_cache": "int3"}, "cache 'int3': unknown"),
        ({"kv_cache": "int8"}, "load with engine native too"),
        ({"engine": "transformers", "kv_cache": "int8"}, "load with engine native too"),
        ({"length": 1}, "nothing to predict"),
        ({"limit": 1}, "1 windows of 96 tokens, .* an interval needs 2"),
        ({"floor_windows": 1}, "1 for the noise floor; an interval needs 2"),
    ],
    ids=str,
)
def test_a_bad_option_is_one_clear_line(
    tiny_low_bit: Path, tiny_llama: Path, text: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(WeightpathError, match=message) as caught:
        verified(tiny_low_bit, tiny_llama, text, **changes)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("content", ["[", '[{"name": "a"}]', '[{"name": "a", "prompt": "b"}]'])
def test_bad_prompts_are_refused_before_anything_is_measured(
    tiny_low_bit: Path, tiny_llama: Path, text: Path, tmp_path: Path, content: str
) -> None:
    (tmp_path / "prompts.json").write_text(content)
    seen: list[str] = []
    with pytest.raises(BadRequest, match="prompts"):
        weightpath.verify(
            tiny_low_bit,
            tiny_llama,
            options(text, prompts=tmp_path / "prompts.json"),
            progress=lambda label, done, total: seen.append(label),
        )
    assert seen == []


def test_the_two_must_be_of_one_vocabulary(tiny_low_bit: Path, tmp_path: Path, text: Path) -> None:
    other = make_checkpoint(tmp_path / "other", vocab_size=160)
    with pytest.raises(BadRequest, match=r"\[95, 160\].*\[95, 128\]"):
        verified(tiny_low_bit, other, text)


def test_a_reference_that_is_low_bit_itself_is_refused(tiny_low_bit: Path, text: Path) -> None:
    with pytest.raises(BadCheckpoint, match="already quantized"):
        verified(tiny_low_bit, tiny_low_bit, text)


def test_fp32_is_taken_where_it_fits_in_half_of_the_memory(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from weightpath.checkpoints.store import open_checkpoint

    checkpoint = open_checkpoint(tiny_llama)
    weights = sum(math.prod(info.shape) for info in checkpoint.tensors.values())
    device = tmp_path / "device.json"
    monkeypatch.setenv("WEIGHTPATH_DEVICE", str(device))
    for available, wanted in (
        (16 * weights + 100, torch.float32),
        (16 * weights - 100, torch.bfloat16),
        (0, torch.float32),
    ):
        device.write_text(json.dumps({"arch": "x86_64", "ram_available": available}))
        assert compute_dtype(checkpoint, None) == wanted
