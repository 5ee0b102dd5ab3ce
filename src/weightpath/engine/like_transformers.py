"""`generate` with transformers' signature, on sessions: for models that an engine of ours runs.

The common arguments mean what they mean there, defaults included (do_sample False; when sampling,
temperature 1, top_k 50, top_p 1, from the model's generation config where it says otherwise). An
argument that is not known here is refused by name: a search that it does not do, or a return form,
is never quietly left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from weightpath.engine.batch import generate_many
from weightpath.engine.sampling import GREEDY, Sampling
from weightpath.engine.session import Engine
from weightpath.engine.stream import Limits, Piece
from weightpath.errors import BadRequest

AT_ONCE = 16
ONLY: dict[str, tuple[Any, ...]] = {
    "use_cache": (None, True), "num_beams": (None, 1), "num_beam_groups": (None, 1),
    "num_return_sequences": (None, 1), "return_dict_in_generate": (None, False),
    "output_scores": (None, False), "output_logits": (None, False),
    "output_attentions": (None, False), "output_hidden_states": (None, False),
    "typical_p": (None, 1.0), "no_repeat_ngram_size": (None, 0), "penalty_alpha": (None,),
    "length_penalty": (None, 1.0), "early_stopping": (None, False), "min_length": (None, 0),
    "min_new_tokens": (None, 0), "logits_processor": (None,), "stopping_criteria": (None,),
    "assistant_model": (None,), "cache_implementation": (None,), "past_key_values": (None,), "cache": (None,), "inputs_embeds": (None,),
}  # fmt: skip
"""Arguments of transformers' that are accepted with these values alone."""
SETTINGS = (
    "max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p", "min_p",
    "repetition_penalty", "eos_token_id", "pad_token_id", "stop_strings",
)  # fmt: skip
"""Arguments that a GenerationConfig holds too."""
NO_SETTING = ("transformers_version", "bos_token_id", "decoder_start_token_id")
"""What a GenerationConfig says that changes no decoder's reply."""
NEW_TOKENS = 20
"""Where no length is given at all, as in transformers."""
DEFAULTS: dict[str, Any] = {
    "do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0,
    "min_p": 0.0, "repetition_penalty": 1.0,
}  # fmt: skip


@torch.inference_mode()
def generate_like_transformers(
    engine: Engine,
    input_ids: Tensor | None = None,
    *,
    generation_config: GenerationConfig | None = None,
    default_config: GenerationConfig | None = None,
    attention_mask: Tensor | None = None,
    streamer: Any = None,
    tokenizer: Any = None,
    seed: int | None = None,
    at_once: int = AT_ONCE,
    **arguments: Any,
) -> Tensor:
    """Prompts int64 [B, L] and what follows them: int64 [B, L + longest reply], padded on the right.

    attention_mask [B, L] marks padding on the left with 0. generation_config: settings for this
    call; default_config: the model's own, under both. arguments: those of SETTINGS, and those of
    ONLY at their one value. stop_strings wants `tokenizer`, and leaves the string's tokens in.
    streamer: put(prompt), put(token)..., end(), for one prompt. seed None: from torch's generator,
    so that torch.manual_seed repeats a call. Prompt i of B draws from seed + i. BadRequest for
    anything else, by name.
    """
    ids = arguments.pop("inputs", None) if input_ids is None else input_ids
    if ids is None or ids.dim() != 2 or not ids.numel():
        found = None if ids is None else list(ids.shape)
        raise BadRequest(f"generate: input_ids are {found}, wanted int64 [B, L] with L >= 1")
    for name, value in arguments.items():
        if name not in SETTINGS:
            _only(name, value)
    given = _settings(default_config, generation_config, arguments)
    if streamer is not None and ids.shape[0] != 1:
        raise BadRequest(f"generate: a streamer takes one prompt, not {ids.shape[0]}")
    stops = _strings(given["stop_strings"])
    if stops and tokenizer is None:
        raise BadRequest("generate: stop_strings need tokenizer=")
    ends = _ids(given["eos_token_id"])
    limits = Limits(_most_new(given, arguments, ids.shape[1]), ends, stops)
    sampling = _sampling(given, seed)
    prompts = [_unpadded(row, mask) for row, mask in zip(ids, _masks(attention_mask, ids), strict=True)]  # fmt: skip
    emit = _no_stream if streamer is None else _to(streamer)
    if streamer is not None:
        streamer.put(ids.cpu())
    each = [sampling] * len(prompts)
    if sampling.seed is not None:
        each = [replace(sampling, seed=sampling.seed + index) for index in range(len(prompts))]
    on_device = getattr(engine, "greedy", None)  # of an engine that picks tokens itself
    if on_device is not None and sampling == GREEDY and streamer is None and not stops:
        replies = on_device(prompts, limits.max_new_tokens, limits.stop_tokens, at_once)
    else:
        many = generate_many(engine, tokenizer, prompts, each, limits, at_once=at_once, emit=emit)
        replies = [[token.token for token in one.tokens] for one in many]
    if streamer is not None:
        streamer.end()
    longest = max(map(len, replies))
    pad = given["pad_token_id"]
    filler = pad if isinstance(pad, int) else (ends or (0,))[0]
    rows = [reply + [filler] * (longest - len(reply)) for reply in replies]
    return torch.cat([ids, torch.tensor(rows, dtype=ids.dtype, device=ids.device)], 1)


def _settings(
    default: GenerationConfig | None, config: GenerationConfig | None, arguments: dict[str, Any]
) -> dict[str, Any]:
    """The settings: an argument, else the call's config, else the model's, else the default."""
    given: dict[str, Any] = {}
    for name in SETTINGS:
        sources = (arguments.get(name), getattr(config, name, None), getattr(default, name, None))
        given[name] = next((v for v in sources if v is not None), DEFAULTS.get(name))
    for source in (config, default):
        for name, value in (source.to_diff_dict() if source is not None else {}).items():
            if name not in SETTINGS and name not in NO_SETTING and not name.startswith("_"):
                _only(name, value)
    return given


def _only(name: str, value: Any) -> None:
    if name not in ONLY:
        raise BadRequest(f"generate: argument {name} is not known here; known are {', '.join((*SETTINGS, *ONLY))}")  # fmt: skip
    if not any(value is one or value == one for one in ONLY[name]):
        raise BadRequest(
            f"generate: {name}={value} is not done by this engine; leave it out, or load the model "
            "on the transformers engine"
        )


def _most_new(given: dict[str, Any], arguments: dict[str, Any], length: int) -> int:
    if given["max_new_tokens"] is not None and arguments.get("max_length") is None:
        return given["max_new_tokens"]
    if arguments.get("max_new_tokens") is not None:
        return arguments["max_new_tokens"]
    if given["max_length"] is None:
        return NEW_TOKENS
    most = given["max_length"] - length
    if most < 1:
        raise BadRequest(
            f"generate: max_length {given['max_length']} leaves nothing after a prompt of {length}; "
            "give max_new_tokens"
        )
    return most


def _sampling(given: dict[str, Any], seed: int | None) -> Sampling:
    penalty = float(given["repetition_penalty"])
    if not given["do_sample"]:
        return Sampling(repetition_penalty=penalty)
    if seed is None:
        seed = int(torch.randint(2**31, ()))
    return Sampling(
        float(given["temperature"]), given["top_k"], float(given["top_p"]), float(given["min_p"]),
        penalty, seed,
    )  # fmt: skip


def _ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, Tensor):
        value = value.tolist()
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _strings(value: Any) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def _masks(mask: Tensor | None, ids: Tensor) -> Sequence[Tensor | None]:
    if mask is not None and mask.shape != ids.shape:
        raise BadRequest(
            f"generate: attention_mask {list(mask.shape)} for input_ids {list(ids.shape)}"
        )
    return [None] * len(ids) if mask is None else list(mask)


def _unpadded(row: Tensor, mask: Tensor | None) -> list[int]:
    if mask is None:
        return row.tolist()
    kept = mask.bool().tolist()
    start = kept.index(True) if True in kept else len(kept)
    if not all(kept[start:]):
        raise BadRequest("generate: attention_mask hides tokens after the first; pad on the left")
    return row[start:].tolist()


def _no_stream(index: int, piece: Piece) -> None:
    """Nobody listens."""


def _to(streamer: Any) -> Callable[[int, Piece], None]:
    def put(index: int, piece: Piece) -> None:
        for token in piece.tokens:
            streamer.put(torch.tensor([token.token]))

    return put
