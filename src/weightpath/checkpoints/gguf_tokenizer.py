"""tokenizer.json and tokenizer_config.json from the vocabulary that a GGUF carries.

    model "gpt2":  byte-level BPE with merges; `tokenizer.ggml.pre` names how text is split first
    model "llama": SentencePiece BPE; merges follow from the scores (a better piece merges first)

Token types: 2 unknown, 3 control (special), 4 user defined (kept whole), 5 unused, 6 byte.
A split that is not known here is an error by name: a wrong split gives wrong ids and no message.
Source: llama.cpp's vocabulary reader (splits, and which of them add a first token or match whole
words before merging); the tokenizer.json files of the models named beside each split.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

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

from weightpath.errors import BadCheckpoint

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SPLITS = {
    "llama3": rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_WORDS}|\p{{N}}|{_REST}",
    "tekken": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
_SPLIT_OF = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), "llama3"),
    "smaug-bpe": "llama3",
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), "qwen2"),
    "tekken": "tekken",
    **dict.fromkeys(("smollm", "starcoder", "minerva-7b"), "digits"),
    "gpt-2": "gpt2",
}
"""tokenizer.ggml.pre -> split: gpt2's own, that with single digits cut out first, or a pattern."""

_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
"""Splits whose words are looked up whole before merging; these also begin with a first token."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def tokenizer_files(where: str, metadata: dict[str, Any], context_length: int) -> dict[str, str]:
    """tokenizer.json and tokenizer_config.json as text, by file name.

    Errors: BadCheckpoint for a tokenizer model or split that is not known here, or a vocabulary
    that does not add up.
    """
    tokens = _listed(where, metadata, "tokens", str)
    if not tokens:
        raise BadCheckpoint(
            where, "carries no tokenizer.ggml.tokens", "give a GGUF with its vocabulary"
        )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise BadCheckpoint(
            where, f"token {twice!r:.40} is in the vocabulary twice", "convert it again"
        )
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer = _byte_level(where, metadata, vocabulary)
    elif model == "llama":
        tokenizer = _sentencepiece(where, metadata, vocabulary)
    else:
        raise BadCheckpoint(
            where,
            f"tokenizer model is {model!r:.40}; read here are gpt2 and llama",
            "give the model's safetensors checkpoint",
        )
    kinds = _listed(where, metadata, "token_type", int) or [1] * len(tokens)
    special = [t for t, kind in zip(tokens, kinds, strict=False) if kind in (UNKNOWN, CONTROL)]
    kept_whole = [t for t, kind in zip(tokens, kinds, strict=False) if kind == USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in kept_whole])

    names = {
        kind: _token(where, metadata, tokens, key)
        for kind, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    first_by_default = model == "llama" or metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS_FIRST
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", first_by_default)) and bool(
        names["bos"]
    )
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and bool(names["eos"])
    ends = (names["bos"] if add_bos else None, names["eos"] if add_eos else None)
    _add_ends(where, tokenizer, *ends)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{kind}_token": token for kind, token in names.items() if token is not None},
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
    }
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return {
        "tokenizer.json": tokenizer.to_str(pretty=False),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
    }


def _byte_level(where: str, metadata: dict[str, Any], vocabulary: dict[str, int]) -> Tokenizer:
    """Byte-level BPE with the merges and the split that the file names."""
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in _SPLIT_OF:
        raise BadCheckpoint(
            where,
            f"tokenizer.ggml.pre is {pre!r:.40}; known are {', '.join(sorted(_SPLIT_OF))}",
            "give the model's safetensors checkpoint",
        )
    merges = []
    for line in _listed(where, metadata, "merges", str):
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if cut < 0 or not {left, right, left + right} <= vocabulary.keys():
            raise BadCheckpoint(
                where, f"merge {line!r:.40} is not of tokens in the vocabulary", "convert it again"
            )
        merges.append((left, right))
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST)
    )
    split = _SPLIT_OF[pre]
    tokenizer.pre_tokenizer = pre_tokenizer_of(split)
    tokenizer.decoder = decoders.ByteLevel()
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def pre_tokenizer_of(split: str) -> pre_tokenizers.PreTokenizer:
    """What cuts a text before byte-level BPE, by the split's name: gpt2, digits, or of SPLITS."""
    if split in SPLITS:
        before = [
            pre_tokenizers.Split(Regex(SPLITS[split]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    else:
        digits = [pre_tokenizers.Digits(individual_digits=True)] if split == "digits" else []
        before = [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    return pre_tokenizers.Sequence(before)


def _sentencepiece(where: str, metadata: dict[str, Any], vocabulary: dict[str, int]) -> Tokenizer:
    """SentencePiece BPE: any two pieces whose join is a piece may merge, the best score first."""
    scores = _listed(where, metadata, "scores", float)
    if len(scores) != len(vocabulary):
        raise BadCheckpoint(
            where, "tokenizer.ggml.scores does not match its tokens", "convert it again"
        )
    pairs = [(-scores[vocabulary[left + right]], left, right) for left, right in joins(vocabulary)]
    pairs.sort(key=lambda pair: (pair[0], vocabulary[pair[1]], vocabulary[pair[2]]))
    unknown = _token(where, metadata, list(vocabulary), "unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[(left, right) for _, left, right in pairs],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if prefix else []), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    return tokenizer


def joins(vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every two pieces whose join is a piece. Work by pieces and lengths, not by their letters."""
    lengths = sorted({len(piece) for piece in vocabulary})
    held = set(lengths)
    return [
        (piece[:cut], piece[cut:])
        for piece in vocabulary
        for cut in (range(1, len(piece)) if len(piece) <= len(lengths) else lengths)
        if 0 < cut < len(piece)
        and len(piece) - cut in held
        and piece[:cut] in vocabulary
        and piece[cut:] in vocabulary
    ]


def _listed(where: str, metadata: dict[str, Any], key: str, kind: type) -> list[Any]:
    """A list of the tokenizer's metadata, [] where there is none; BadCheckpoint if of other items."""
    found = metadata.get(f"tokenizer.ggml.{key}")
    found = [] if found is None else found
    if not isinstance(found, list) or not all(type(item) is kind for item in found):
        raise BadCheckpoint(
            where, f"tokenizer.ggml.{key} is no list of {kind.__name__}", "convert it again"
        )
    return found


def _add_ends(where: str, tokenizer: Tokenizer, first: str | None, last: str | None) -> None:
    """Put a first or last token around every text, where the model was trained with it."""
    if first is None and last is None:
        return
    around = [token for token in (first, last) if token is not None]
    for token in around:
        if not token or token[0] == "$" or any(sign == ":" or sign.isspace() for sign in token):
            raise BadCheckpoint(
                where, f"puts token {token!r:.40} around a text, which no template has room for",
                "convert it again",
            )  # fmt: skip
    single = " ".join([*([first] if first else []), "$A", *([last] if last else [])])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(around)],
    )


def _token(where: str, metadata: dict[str, Any], tokens: list[str], kind: str) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{kind}_token_id")
    if index is None:
        return None
    if type(index) is not int or not 0 <= index < len(tokens):
        raise BadCheckpoint(
            where, f"{kind} token is {index!r:.40} of {len(tokens)} tokens", "convert it again"
        )
    return tokens[index]
