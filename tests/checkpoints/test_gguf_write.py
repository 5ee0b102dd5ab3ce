"""GGUF files that we write: logits, names, row order, config, tokenizer, exactness, refusals."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gguf import logits
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tiny_gguf import (
    MERGES,
    byte_letters,
    file_tensors,
    gguf_name,
    make_folder,
    make_tokenizer,
    tiny_model,
    vocabulary,
)
from weightpath.checkpoints import gguf_merges, gguf_write
from weightpath.checkpoints.gguf import GGUFCheckpoint
from weightpath.checkpoints.gguf_tokenizer import SPLITS
from weightpath.checkpoints.gguf_vocabulary import TEXTS, vocabulary_metadata
from weightpath.checkpoints.gguf_write import Weight, WrittenGGUF, float_weights, write_gguf
from weightpath.checkpoints.store import open_checkpoint
from weightpath.errors import BadCheckpoint, BadRequest, BadTensor
from weightpath.qweight import QWeight
from weightpath.scheme import PER_CHANNEL, Scheme

SIZE = 272
"""Rows of the embedding: the 269 tokens of tiny_gguf's vocabulary, and three that are unused."""

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tokenizer"), chat_template="{{ messages }}")


def config_of(model: PreTrainedModel) -> dict[str, Any]:
    """config.json as transformers writes it."""
    return json.loads(model.config.to_json_string(use_diff=False))


def float_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    tied = model.config.tie_word_embeddings
    return {
        name: value for name, value in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }  # fmt: skip


def weights_of(
    model: PreTrainedModel, qweights: dict[str, QWeight] | None = None
) -> dict[str, Weight]:
    found = {
        name: Weight(None, lambda value=value: value)
        for name, value in float_tensors(model).items()
    }
    for name, qweight in (qweights or {}).items():
        found[name] = Weight(qweight.scheme, lambda qweight=qweight: qweight)
    return found


def rounded_to_grid(weight: torch.Tensor, scheme: Scheme) -> QWeight:
    """Round-to-nearest with float16 scales: enough to have codes that matter."""
    n, k = weight.shape
    groups = scheme.groups(k)
    rows = weight.float().view(n, groups, k // groups)
    if scheme.symmetric:
        scales = (rows.abs().amax(2) / (scheme.midpoint - 1)).half()
        zeros = None
        codes = torch.round(rows / scales.float()[..., None]) + scheme.midpoint
    else:
        low, high = rows.amin(2), rows.amax(2)
        scales = ((high - low) / scheme.top_code).half()
        zeros = torch.round(-low / scales.float()).clamp(0, scheme.top_code)
        codes = torch.round(rows / scales.float()[..., None]) + zeros[..., None]
    codes = codes.clamp(0, scheme.top_code).to(torch.uint8).view(n, k)
    return QWeight(scheme, codes, scales, None if zeros is None else zeros.to(torch.int16))


def low_bit(model: PreTrainedModel, scheme: Scheme) -> dict[str, QWeight]:
    """Every projection in codes; the model takes the values they stand for."""
    qweights = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.weight"):
                qweights[name] = rounded_to_grid(parameter, scheme)
                parameter.copy_(qweights[name].dequantize())
            elif parameter.ndim == 2:
                parameter.copy_(parameter.half().float())
    return qweights


def rebuilt(path: Path) -> PreTrainedModel:
    """A float32 transformers model with the config and values that the reader gives."""
    checkpoint = GGUFCheckpoint(path)
    config = AutoConfig.for_model(**(checkpoint.config | {"dtype": "float32"}))
    model = AutoModelForCausalLM.from_config(config).eval()
    state = {name: checkpoint.read(name).float() for name in checkpoint.tensors}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    return model


def tiny(architecture: str = "llama", **changes: Any) -> PreTrainedModel:
    return tiny_model(architecture, **({"vocab_size": SIZE} | changes))


def written(path: Path, model: PreTrainedModel, folder: Path, **options: Any) -> WrittenGGUF:
    return write_gguf(path, config_of(model), weights_of(model), folder, **options)


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [
        (Scheme(4, 32), "Q4_0"),
        (Scheme(4, 64), "Q4_0"),
        (Scheme(8), "Q8_0"),
        (Scheme(3, 32), "Q4_0"),
        (Scheme(5, 32), "Q5_0"),
    ],
)
def test_a_low_bit_llama_read_back_has_the_same_logits(
    scheme: Scheme, kind: str, folder: Path, tmp_path: Path
) -> None:
    model = tiny()
    qweights = low_bit(model, scheme)
    done = write_gguf(tmp_path / "m.gguf", config_of(model), weights_of(model, qweights), folder)
    assert torch.equal(logits(rebuilt(done.path)), logits(model))
    assert all(stored.exact for stored in done.tensors.values())
    checkpoint = GGUFCheckpoint(done.path)
    for name, qweight in qweights.items():
        again = checkpoint.read_qweight(name.removesuffix(".weight"))
        assert done.tensors[name].kind == kind
        assert torch.equal(again.dequantize(), qweight.dequantize())
        shift = again.scheme.midpoint - scheme.midpoint
        assert torch.equal(again.codes, qweight.codes + shift)


def test_an_asymmetric_llama_is_lossy_by_what_is_told(folder: Path, tmp_path: Path) -> None:
    model = tiny()
    qweights = low_bit(model, Scheme(4, 64, False))
    weights = weights_of(model, qweights)
    done = write_gguf(tmp_path / "m.gguf", config_of(model), weights, folder)
    checkpoint = GGUFCheckpoint(done.path)
    for name, qweight in qweights.items():
        stored = done.tensors[name]
        change = (checkpoint.read(name) - qweight.dequantize()).abs()
        assert stored.kind == "Q4_1"
        assert stored.largest_change == float(change.max())
        assert stored.mean_change == pytest.approx(float(change.double().mean()), rel=1e-9)
        assert stored.exactness.startswith("lossy")
    with pytest.raises(BadTensor, match="without loss"):
        write_gguf(tmp_path / "x.gguf", config_of(model), weights, folder, exact_only=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf"]


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"head_dim": 16}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3", {"head_dim": 64, "tie_word_embeddings": True}),
    ],
)
@pytest.mark.parametrize("float_kind", ["F16", "F32"])
def test_a_float_model_read_back_has_the_same_logits(
    architecture: str, changes: dict[str, Any], float_kind: Any, folder: Path, tmp_path: Path
) -> None:
    model = tiny(architecture, **changes)
    if float_kind == "F16":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.half().float())
    done = written(tmp_path / "m.gguf", model, folder, float_kind=float_kind)
    again = rebuilt(done.path)
    assert type(again) is type(model)
    assert torch.equal(logits(again), logits(model))
    assert all(stored.exact for stored in done.tensors.values())


def test_the_file_is_what_an_independent_writer_makes_tensor_for_tensor(
    folder: Path, tmp_path: Path
) -> None:
    """Names, interleaved rows, types, shapes and alignment, as gguf-py's reader sees them."""
    model = tiny(attention_bias=True)
    done = written(tmp_path / "m.gguf", model, folder, float_kind="F32")
    reader = gguf.GGUFReader(done.path)
    wanted = file_tensors(model, "llama")
    assert {tensor.name for tensor in reader.tensors} == set(wanted)
    for tensor in reader.tensors:
        assert tensor.data_offset % 32 == 0
        assert tensor.tensor_type.name == "F32"
        assert np.array_equal(tensor.data, wanted[tensor.name])
    assert done.tensors[Q].gguf_name == gguf_name(Q)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert fields["GGUF.version"] == 3
    assert fields["general.architecture"] == "llama"
    assert fields["general.file_type"] == int(gguf.LlamaFileType.ALL_F32)
    assert fields["llama.rope.dimension_count"] == 32
    assert fields["llama.attention.head_count_kv"] == 2


@pytest.mark.parametrize("scheme", [None, Scheme(4, 32)])
def test_sabotage_q_and_k_left_in_their_order_change_the_logits(
    scheme: Scheme | None, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny()
    qweights = low_bit(model, scheme) if scheme else None
    monkeypatch.setattr(gguf_write, "hf_rows", lambda rows, heads: np.arange(rows))
    done = write_gguf(tmp_path / "m.gguf", config_of(model), weights_of(model, qweights), folder)
    assert float((logits(rebuilt(done.path)) - logits(model)).abs().max()) > 1e-3


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_the_config_comes_back_as_it_went_in(
    architecture: str, folder: Path, tmp_path: Path
) -> None:
    model = tiny(architecture, rms_norm_eps=1e-6, max_position_embeddings=4096)
    done = written(tmp_path / "m.gguf", model, folder)
    before, after = config_of(model), GGUFCheckpoint(done.path).config
    for key in (
        "architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size",
        "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "model_type",
        "max_position_embeddings", "tie_word_embeddings", "rope_parameters",
    ):  # fmt: skip
        wanted = [type(model).__name__] if key == "architectures" else before[key]
        assert after[key] == wanted, key


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        LLAMA3,
    ],
)
@pytest.mark.parametrize("older", [False, True])
def test_rope_scaling_comes_back_from_both_spellings(
    rope: dict[str, Any], older: bool, folder: Path, tmp_path: Path
) -> None:
    model = tiny(rope_parameters={"rope_theta": 50000.0, **rope})
    config = config_of(model)
    if older:
        del config["rope_parameters"]
        named = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
        config |= {"rope_theta": 50000.0, "rope_scaling": named}
    path = tmp_path / "m.gguf"
    write_gguf(path, config, weights_of(model), folder, float_kind="F32")
    assert GGUFCheckpoint(path).config["rope_parameters"] == {"rope_theta": 50000.0, **rope}
    assert torch.equal(logits(rebuilt(path)), logits(model))


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("qwen2", {"rope_parameters": LLAMA3 | {"rope_theta": 1e4}}, "llama3"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16,
                                 "original_max_position_embeddings": 128}},
            "beta_fast 16",
        ),
        ("llama", {"hidden_act": "gelu"}, "gelu"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "sliding_attention"),
        ("llama", {"model_type": "gemma2"}, "gemma2"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "Classification"),
        ("llama", {"num_key_value_heads": 3}, "3 for keys"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps"),
        ("llama", {"hidden_size": "128"}, "hidden_size"),
        ("qwen2", {"head_dim": 16}, "head_dim is 16"),
    ],
)  # fmt: skip
def test_a_model_that_llama_cpp_would_run_otherwise_is_refused_by_name(
    architecture: str, changes: dict[str, Any], words: str, folder: Path, tmp_path: Path
) -> None:
    model = tiny(architecture)
    with pytest.raises(BadCheckpoint, match=words) as told:
        write_gguf(tmp_path / "m.gguf", config_of(model) | changes, weights_of(model), folder)
    assert "\n" not in str(told.value)
    assert not list(tmp_path.iterdir())


def test_a_sliding_window_is_kept_in_the_file_and_told(folder: Path, tmp_path: Path) -> None:
    model = tiny()
    config = config_of(model) | {"model_type": "mistral", "sliding_window": 64}
    config["architectures"] = ["MistralForCausalLM"]
    done = write_gguf(tmp_path / "m.gguf", config, weights_of(model), folder)
    assert any("sliding_window 64" in note for note in done.notes)
    again = GGUFCheckpoint(done.path).config
    assert (again["model_type"], again["sliding_window"]) == ("mistral", 64)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop(Q), "is missing"),
        (lambda w: w.pop("lm_head.weight"), "does not tie the head"),
        (lambda w: w.update({f"{Q}.extra": w[Q]}), "no place in a LlamaForCausalLM"),
        (lambda w: w.update({Q: Weight(None, lambda: torch.zeros(4, 4))}), r"\(4, 4\)"),
        (lambda w: w.update({Q: Weight(None, lambda: torch.zeros(128, 128).int())}), "int32"),
        (lambda w: w.update({Q: Weight(Scheme(4, 32), lambda: torch.zeros(128, 128))}), "Q4_0"),
        (lambda w: w.update({Q: Weight(Scheme(4, 48), lambda: torch.zeros(1))}), "groups of 48"),
        (
            lambda w: w.update({"model.norm.weight": Weight(Scheme(4, 32), lambda: torch.ones(1))}),
            "is a vector",
        ),
        (
            lambda w: w.update({Q: Weight(None, lambda: torch.full((128, 128), 7e4))}),
            "70000, F16 ends at 65504",
        ),
        (
            lambda w: w.update({Q: Weight(None, lambda: torch.full((128, 128), torch.nan))}),
            "NaN or infinite",
        ),
    ],
)
def test_a_bad_tensor_is_named_and_nothing_is_left(
    change: Callable[[dict[str, Weight]], object], words: str, folder: Path, tmp_path: Path
) -> None:
    model = tiny()
    weights = weights_of(model)
    change(weights)
    with pytest.raises(BadTensor, match=words) as told:
        write_gguf(tmp_path / "m.gguf", config_of(model), weights, folder)
    assert "\n" not in str(told.value)
    assert not list(tmp_path.iterdir())


def test_bfloat16_becomes_float16_with_the_loss_measured_or_stays(
    folder: Path, tmp_path: Path
) -> None:
    model = tiny().bfloat16()
    with torch.no_grad():
        model.model.embed_tokens.weight[0, :4] = torch.tensor([2.0**-30, -(2.0**-30), 1.0, 3.0])
    done = written(tmp_path / "half.gguf", model, folder)
    stored = done.tensors["model.embed_tokens.weight"]
    read = GGUFCheckpoint(done.path).read("model.embed_tokens.weight")
    change = (read.float() - model.model.embed_tokens.weight.detach().float()).abs()
    assert read.dtype == torch.float16
    assert stored.largest_change == float(change.max())
    assert stored.largest_change >= 2.0**-30
    assert stored.exactness.startswith("lossy: F16 rounds")
    kept = written(tmp_path / "kept.gguf", model, folder, float_kind="BF16", exact_only=True)
    read = GGUFCheckpoint(kept.path).read("model.embed_tokens.weight")
    assert read.dtype == torch.bfloat16
    assert torch.equal(read, model.model.embed_tokens.weight)
    norm = GGUFCheckpoint(kept.path).read("model.norm.weight")
    assert norm.dtype == torch.float32
    assert torch.equal(norm, model.model.norm.weight.float())


def test_rows_written_in_several_steps_are_the_rows_written_at_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(attention_bias=True)
    weights = weights_of(model, low_bit(model, Scheme(4, 32)))
    whole = write_gguf(tmp_path / "a.gguf", config_of(model), weights, folder)
    monkeypatch.setattr(gguf_write, "VALUES_AT_ONCE", 300)
    steps = write_gguf(tmp_path / "b.gguf", config_of(model), weights, folder)
    assert steps.path.read_bytes() == whole.path.read_bytes()
    assert steps.tensors == whole.tensors


def test_one_tensor_is_held_at_a_time_and_progress_is_told(folder: Path, tmp_path: Path) -> None:
    model = tiny()
    alive, most, told = 0, 0, []

    def gone() -> None:
        nonlocal alive
        alive -= 1

    def reader(value: torch.Tensor) -> Callable[[], torch.Tensor]:
        def read() -> torch.Tensor:
            nonlocal alive, most
            copy = value.clone()
            alive += 1
            most = max(most, alive)
            weakref.finalize(copy, gone)
            return copy

        return read

    weights = {name: Weight(None, reader(value)) for name, value in float_tensors(model).items()}
    write_gguf(
        tmp_path / "m.gguf", config_of(model), weights, folder,
        progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    assert most == 1
    assert told == [(n, len(weights)) for n in range(1, len(weights) + 1)]


def test_a_file_is_replaced_only_when_asked_and_whole(folder: Path, tmp_path: Path) -> None:
    model, path = tiny(), tmp_path / "m.gguf"
    written(path, model, folder)
    first = path.read_bytes()
    with pytest.raises(BadRequest, match="exists already"):
        written(path, model, folder)
    broken = weights_of(model) | {"lm_head.weight": Weight(None, lambda: torch.zeros(1, 1))}
    with pytest.raises(BadTensor):
        write_gguf(path, config_of(model), broken, folder, overwrite=True)
    assert path.read_bytes() == first
    written(path, model, folder, overwrite=True, float_kind="F32")
    assert path.stat().st_size > len(first)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
    with pytest.raises(BadRequest, match=r"not named \.gguf"):
        written(tmp_path / "m.bin", model, folder)


def test_what_a_killed_run_left_is_written_over_and_what_others_left_is_not(
    folder: Path, tmp_path: Path
) -> None:
    model, left = tiny(), tmp_path / "m.gguf.partial"
    left.write_bytes(b"GGUF and more")
    written(tmp_path / "m.gguf", model, folder)
    assert not left.exists()
    left.write_text("my notes")
    with pytest.raises(BadRequest, match="move it away"):
        written(tmp_path / "m.gguf", model, folder, overwrite=True)
    assert left.read_text() == "my notes"


def test_a_head_given_beside_a_tied_config_is_written_and_told(
    folder: Path, tmp_path: Path
) -> None:
    model = tiny(tie_word_embeddings=True)
    head = rounded_to_grid(model.model.embed_tokens.weight.detach(), Scheme(8))
    weights = weights_of(model, {"lm_head.weight": head})
    done = write_gguf(tmp_path / "m.gguf", config_of(model), weights, folder)
    assert any("ties the head" in note for note in done.notes)
    checkpoint = GGUFCheckpoint(done.path)
    assert checkpoint.linears == {"lm_head": ("Q8_0", Scheme(8, 32))}
    assert torch.equal(checkpoint.read("lm_head.weight"), head.dequantize())


def test_rotary_frequencies_are_left_out_and_told(folder: Path, tmp_path: Path) -> None:
    model = tiny()
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    weights = weights_of(model) | {name: Weight(None, lambda: torch.ones(16))}
    done = write_gguf(tmp_path / "m.gguf", config_of(model), weights, folder)
    assert any(name in note for note in done.notes)
    assert name not in done.tensors
    assert name not in GGUFCheckpoint(done.path).tensors


# The tokenizer


def read_back(folder: Path, size: int = SIZE, **config: Any) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer that our reader makes of what is written, and the plain metadata."""
    from weightpath.checkpoints.gguf_tokenizer import tokenizer_files

    values, _ = vocabulary_metadata(folder, size, config)
    plain = {key: value for key, (_, value) in values.items()}
    return Tokenizer.from_str(tokenizer_files("here", plain, 0)["tokenizer.json"]), plain


@pytest.fixture(scope="module")
def pair(folder: Path) -> tuple[Tokenizer, Tokenizer]:
    return Tokenizer.from_file(str(folder / "tokenizer.json")), read_back(folder)[0]


@given(text=st.text(st.characters(codec="utf-8"), max_size=40) | st.sampled_from(TEXTS))
@settings(max_examples=150, deadline=None)
def test_text_has_the_same_ids_and_comes_back(pair: tuple[Tokenizer, Tokenizer], text: str) -> None:
    before, after = pair
    ids = before.encode(text).ids
    assert after.encode(text).ids == ids
    assert after.decode(ids) == before.decode(ids) == text


def test_special_tokens_types_template_and_ends_are_in_the_file(
    folder: Path, tmp_path: Path
) -> None:
    done = written(tmp_path / "m.gguf", tiny(), folder)
    checkpoint = GGUFCheckpoint(done.path)
    texts = checkpoint.companion_texts
    tokenizer = Tokenizer.from_str(texts["tokenizer.json"])
    assert tokenizer.encode("<|start|>hello<think>12<|end|>").tokens == [
        "<|start|>", "hello", "<think>", "1", "2", "<|end|>"
    ]  # fmt: skip
    stated = json.loads(texts["tokenizer_config.json"])
    assert stated["chat_template"] == "{{ messages }}"
    assert (stated["bos_token"], stated["eos_token"]) == ("<|start|>", "<|end|>")
    assert (stated["add_bos_token"], stated["add_eos_token"]) == (False, False)
    _, plain = read_back(folder)
    assert plain["tokenizer.ggml.token_type"] == [3, 3, *[1] * 265, 4, *[5] * 4]
    assert plain["tokenizer.ggml.tokens"][-2:] == ["[PAD270]", "[PAD271]"]
    assert plain["tokenizer.ggml.merges"] == MERGES
    assert plain["tokenizer.ggml.pre"] == "smollm"


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
PLAIN = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([cut, PLAIN])


@pytest.mark.parametrize(
    ("pre", "options", "name"),
    [
        (GPT2, {}, "gpt-2"),
        (split_by(SPLITS["llama3"]), {"ignore_merges": True}, "llama-bpe"),
        (split_by(SPLITS["llama3"]), {}, "smaug-bpe"),
        (split_by(SPLITS["llama3"].replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)",
                                           "'(?i:[sdmt]|ll|ve|re)")), {}, "smaug-bpe"),
        (split_by(SPLITS["qwen2"]), {}, "qwen2"),
        (split_by(SPLITS["tekken"]), {"ignore_merges": True}, "tekken"),
    ],
)  # fmt: skip
def test_a_split_is_known_by_its_steps(
    pre: pre_tokenizers.PreTokenizer, options: dict[str, Any], name: str, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer(pre, **options)
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    again, plain = read_back(make_folder(tmp_path, tokenizer))
    assert plain["tokenizer.ggml.pre"] == name
    for text in TEXTS:
        assert again.encode(text).ids == tokenizer.encode(text).ids


def with_template(single: str) -> Tokenizer:
    tokenizer = make_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<|start|>", 1), ("<|end|>", 0)]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("single", "stated", "bos", "eos"),
    [
        ("$A", {}, False, False),
        ("<|start|> $A", {}, True, False),
        ("<|start|> $A <|end|>", {}, True, True),
        ("$A <|end|>", {"add_bos_token": True}, True, True),
        ("<|start|> $A", {"add_bos_token": False}, False, False),
    ],
)
def test_the_first_and_last_token_are_those_of_the_original(
    single: str, stated: dict[str, Any], bos: bool, eos: bool, tmp_path: Path
) -> None:
    _, plain = read_back(make_folder(tmp_path, with_template(single), **stated))
    assert plain["tokenizer.ggml.add_bos_token"] is bos
    assert plain["tokenizer.ggml.add_eos_token"] is eos


def test_end_tokens_and_sampling_of_generation_come_back(tmp_path: Path) -> None:
    from weightpath.checkpoints.gguf_config import generation_config

    folder = make_folder(tmp_path, bos_token=None)
    settings_ = {"eos_token_id": [0, 267, 5], "do_sample": True, "temperature": 0.6, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps(settings_))
    _, plain = read_back(folder, bos_token_id=1)
    assert generation_config(plain) == settings_ | {"bos_token_id": 1, "pad_token_id": 0}


def test_named_templates_and_the_template_file_are_kept(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    folder = make_folder(tmp_path, chat_template=listed)
    _, plain = read_back(folder)
    assert plain["tokenizer.chat_template"] == "a"
    assert plain["tokenizer.chat_template.tool_use"] == "b"
    (folder / "chat_template.jinja").write_text("from the file")
    assert read_back(folder)[1]["tokenizer.chat_template"] == "from the file"


def test_a_tokenizer_that_gguf_cannot_say_is_refused_by_name(tmp_path: Path) -> None:
    def lowered() -> Tokenizer:
        tokenizer = make_tokenizer()
        tokenizer.normalizer = normalizers.Lowercase()
        return tokenizer

    def unigram() -> Tokenizer:
        return Tokenizer(models.Unigram([("a", -1.0), ("b", -2.0)], unk_id=0))

    cases: list[tuple[Tokenizer, dict[str, Any], str]] = [
        (make_tokenizer(split_by(r"\w+|\W+")), {}, "pre_tokenizer"),
        (make_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=True)), {}, "add_prefix_space"),
        (make_tokenizer(ignore_merges=True), {}, "split of digits with ignore_merges true"),
        (lowered(), {}, "Lowercase"),
        (unigram(), {}, "Unigram"),
        (make_tokenizer(), {"eos_token": None}, "names no end-of-text token"),
        (make_tokenizer(), {"eos_token": "<eos>"}, "no eos token"),
        (with_template("<|end|> $A"), {}, r"puts tokens \[0\]"),
    ]
    for number, (tokenizer, stated, words) in enumerate(cases):
        folder = make_folder(tmp_path / str(number), tokenizer, **stated)
        with pytest.raises(BadCheckpoint, match=words) as told:
            vocabulary_metadata(folder, SIZE, {})
        assert "\n" not in str(told.value)
    with pytest.raises(BadCheckpoint, match="token ids up to 267, the embedding 100 rows"):
        vocabulary_metadata(make_folder(tmp_path / "small"), 100, {})


def test_sabotage_a_split_taken_for_another_is_found_by_the_texts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gguf_merges._PRE, ("digits", False), "gpt-2")
    with pytest.raises(BadCheckpoint, match="otherwise as GGUF"):
        vocabulary_metadata(folder, SIZE, {})


def sentencepiece() -> Tokenizer:
    """A SentencePiece-style BPE as Llama 2's: spaces as ▁, bytes for what is not there."""
    letters = [*"abcdefghijklmnopqrstuvwxyz", "▁"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "the"), ("▁t", "h"), ("▁th", "e")]
    pieces = ["he", "▁t", "th", "the", "▁th", "▁the"]
    merges = [
        (a + b, a, b) for piece in pieces for cut in range(1, len(piece))
        for a, b in [(piece[:cut], piece[cut:])] if {a, b} <= {*letters, *pieces}
    ]  # fmt: skip
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [*pieces, *letters]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={t: i for i, t in enumerate(tokens)}, merges=[(a, b) for _, a, b in merges],
            unk_token="<unk>", fuse_unk=True, byte_fallback=True,
        )
    )  # fmt: skip
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in tokens[:3]])
    return tokenizer


def test_a_sentencepiece_vocabulary_becomes_scores_and_comes_back(tmp_path: Path) -> None:
    tokenizer = sentencepiece()
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": None}
    again, plain = read_back(make_folder(tmp_path, tokenizer, **names), 300)
    assert plain["tokenizer.ggml.model"] == "llama"
    assert plain["tokenizer.ggml.add_space_prefix"] is True
    assert plain["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
    tokens, scores = plain["tokenizer.ggml.tokens"], plain["tokenizer.ggml.scores"]
    order = sorted(("he", "▁t", "th", "the", "▁the"), key=lambda t: -scores[tokens.index(t)])
    assert order == ["he", "▁t", "th", "the", "▁the"]
    for text in ("the then", "there is the tea", "Ünïcode the\nend", *TEXTS):
        assert again.encode(text).ids == tokenizer.encode(text).ids


def test_sentencepiece_merges_that_scores_do_not_give_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, sentencepiece(), eos_token="</s>", bos_token="<s>",
                         pad_token=None)  # fmt: skip
    path = folder / "tokenizer.json"
    stated = json.loads(path.read_text())
    merges = stated["model"]["merges"]
    stated["model"]["merges"] = merges[1:]
    path.write_text(json.dumps(stated))
    with pytest.raises(BadCheckpoint, match="nothing merges into 'he'"):
        vocabulary_metadata(folder, 300, {})
    stated["model"]["merges"] = [merges[-1], *merges[:-1]]
    path.write_text(json.dumps(stated))
    with pytest.raises(BadCheckpoint, match="results are mixed"):
        vocabulary_metadata(folder, 300, {})


@pytest.mark.slow
def test_the_demo_model_written_as_q8_0_and_f16_keeps_tokenizer_and_values(
    demo_model: Path, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(demo_model)
    weights = float_weights(checkpoint)
    codes = {
        name: rounded_to_grid(checkpoint.read(name), Scheme(8, PER_CHANNEL))
        for name in weights if ".layers.0." in name and name.endswith("_proj.weight")
    }  # fmt: skip
    for name, qweight in codes.items():
        weights[name] = Weight(qweight.scheme, lambda qweight=qweight: qweight)
    done = write_gguf(tmp_path / "demo.gguf", checkpoint.config, weights, demo_model)
    again = GGUFCheckpoint(done.path)
    for name in checkpoint.tensors:
        wanted = codes[name].dequantize() if name in codes else checkpoint.read(name).float()
        change = float((again.read(name).float() - wanted).abs().max())
        assert change == done.tensors[name].largest_change, name
        assert change < 2.0**-24, name
    before = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    after = Tokenizer.from_str(again.companion_texts["tokenizer.json"])
    for text in (*TEXTS, Path(__file__).read_text(), "<|im_start|>user\nhi<|im_end|>\n"):
        assert after.encode(text).ids == before.encode(text).ids


@pytest.mark.slow
def test_a_real_qwen3_comes_back_with_its_config_and_tokenizer(
    pycode: Path, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(pycode)
    weights = float_weights(checkpoint)
    done = write_gguf(
        tmp_path / "p.gguf", checkpoint.config, weights, pycode, float_kind="BF16", exact_only=True
    )
    again = GGUFCheckpoint(done.path)
    for key in ("model_type", "head_dim", "rope_parameters", "tie_word_embeddings", "vocab_size"):
        assert again.config[key] == checkpoint.config[key]
    for name in checkpoint.tensors:
        assert torch.equal(again.read(name).float(), checkpoint.read(name).float())
    before = Tokenizer.from_file(str(pycode / "tokenizer.json"))
    after = Tokenizer.from_str(again.companion_texts["tokenizer.json"])
    text = Path(__file__).read_text()
    assert after.encode(text).ids == before.encode(text).ids


def test_the_vocabulary_used_here_is_every_byte_once() -> None:
    assert len(set(byte_letters())) == 256
    assert len(vocabulary()[:-1]) == 268
