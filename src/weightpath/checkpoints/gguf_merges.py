"""How a tokenizer.json cuts and merges text, as GGUF says it.

    byte-level BPE      model "gpt2": the merges, and the name of the split before them
    SentencePiece BPE   model "llama": scores, -(rank of a piece's first merge); spaces as ▁

GGUF names a split instead of holding it, and llama.cpp knows the names: a split is recognised by
its steps, compared with those that gguf_tokenizer makes for a name. llama.cpp has no merges for
model "llama": it joins any two neighbours whose join is a piece, the best score first, so merges
that do otherwise are refused.
Source: llama.cpp's vocabulary reader; the tokenizers package's JSON.
"""

from __future__ import annotations

import json
from typing import Any

from gguf.constants import GGUFValueType

from weightpath.checkpoints.gguf_metadata import Values
from weightpath.checkpoints.gguf_tokenizer import SPLITS, joins, pre_tokenizer_of
from weightpath.errors import BadCheckpoint

KEEP = "keep the checkpoint as safetensors"
AGAIN = "fetch the tokenizer again"

_PRE = {
    ("llama3", True): "llama-bpe", ("llama3", False): "smaug-bpe", ("qwen2", False): "qwen2",
    ("tekken", True): "tekken", ("digits", False): "smollm", ("gpt2", False): "gpt-2",
}  # fmt: skip
"""Split, and whether whole words come before merges -> tokenizer.ggml.pre."""

_SAME_BEGINNING = {r"'(?i:[sdmt]|ll|ve|re)|": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"}
"""Beginnings of patterns that match the same texts: what is found -> what SPLITS has."""


def byte_level(
    where: str, stated: dict[str, Any], model: dict[str, Any]
) -> tuple[Values, list[str]]:
    """Model, split and merges of a byte-level BPE, and notes.

    Errors: BadCheckpoint for a split without a name, or steps and merges llama.cpp has not.
    """
    odd = [
        k for k in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(k)
    ]
    if odd or (stated.get("decoder") or {}).get("type") != "ByteLevel":
        found = f"{odd[0]} {model[odd[0]]!r}" if odd else f"decoder {stated.get('decoder')!r:.60}"
        raise BadCheckpoint(where, f"has {found}, which GGUF has not", KEEP)
    normalizers = [step.get("type") for step in _steps(stated.get("normalizer"))]
    if set(normalizers) - {"NFC"}:
        raise BadCheckpoint(where, f"has normalizers {normalizers}, which GGUF has not", KEEP)
    notes = ["llama.cpp leaves out the tokenizer's NFC normalizer"] if normalizers else []
    steps = _steps(stated.get("pre_tokenizer"))
    made = {name: pre_tokenizer_of(name).__getstate__() for name in (*SPLITS, "digits", "gpt2")}
    split = next((name for name, json_ in made.items() if _steps(json.loads(json_)) == steps), "")
    whole_words_first = bool(model.get("ignore_merges"))
    pre = _PRE.get((split, whole_words_first))
    if pre is None:
        found = f"pre_tokenizer {json.dumps(steps):.120}"
        if split:
            found = f"the split of {split} with ignore_merges {str(whole_words_first).lower()}"
        known = ", ".join(_PRE.values())
        raise BadCheckpoint(where, f"has {found}; GGUF's names known here are {known}", KEEP)
    merges = [f"{left} {right}" for left, right in _merges(where, model)]
    if not merges or any(merge.count(" ") != 1 for merge in merges):
        found = next((repr(merge) for merge in merges if merge.count(" ") != 1), "none")
        raise BadCheckpoint(where, f"has merges that llama.cpp does not load ({found:.40})", KEEP)
    return {
        "tokenizer.ggml.model": (GGUFValueType.STRING, "gpt2"),
        "tokenizer.ggml.pre": (GGUFValueType.STRING, pre),
        "tokenizer.ggml.merges": (GGUFValueType.ARRAY, merges),
    }, notes


def sentencepiece(
    where: str, stated: dict[str, Any], model: dict[str, Any], vocabulary: dict[str, int], size: int
) -> Values:
    """Model, scores and space prefix of a SentencePiece BPE with `size` ids.

    Errors: BadCheckpoint for merges that scores do not give, other steps than spaces as ▁, and
    byte tokens that are missing.
    """
    missing = next((byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary), None)
    if missing is not None:
        raise BadCheckpoint(where, f"falls back to bytes, but has no <0x{missing:02X}>", AGAIN)
    merges = _merges(where, model)
    ranks = {piece: n for n, piece in enumerate(dict.fromkeys(a + b for a, b in merges))}
    order = [ranks[left + right] for left, right in merges]
    special = {entry.get("content") for entry in stated.get("added_tokens") or ()}
    strays = {a + b for a, b in set(joins(vocabulary)) - set(merges)} - special
    if strays or order != sorted(order):
        found = f"nothing merges into {min(strays)!r}" if strays else "results are mixed"
        raise BadCheckpoint(where, f"has merges that scores do not give ({found:.60})", KEEP)
    steps = [*_steps(stated.get("normalizer")), *_steps(stated.get("pre_tokenizer"))]
    kinds = [str(step.get("type")) for step in steps]
    if set(kinds) - {"Prepend", "Replace", "Metaspace"} or not {"Replace", "Metaspace"} & set(
        kinds
    ):
        raise BadCheckpoint(where, f"has steps {kinds}, GGUF has spaces as ▁ alone", KEEP)
    prefix = "Prepend" in kinds or any(
        step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never"
        for step in steps
    )
    scores = [0.0] * size
    for piece, index in vocabulary.items():
        scores[index] = -float(ranks.get(piece, len(ranks)))
    return {
        "tokenizer.ggml.model": (GGUFValueType.STRING, "llama"),
        "tokenizer.ggml.pre": (GGUFValueType.STRING, "default"),
        "tokenizer.ggml.scores": (GGUFValueType.ARRAY, scores),
        "tokenizer.ggml.add_space_prefix": (GGUFValueType.BOOL, prefix),
    }


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A normalizer's or pre-tokenizer's steps in one list, without what changes offsets only."""
    if not part:
        return []
    for inner in ("pretokenizers", "normalizers"):
        if inner in part:
            return [step for each in part[inner] for step in _steps(each)]
    step = {key: value for key, value in part.items() if key != "trim_offsets"}
    pattern = step.get("pattern")
    if isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
        regex = pattern["Regex"]
        for found, same in _SAME_BEGINNING.items():
            if regex.startswith(found):
                regex = same + regex.removeprefix(found)
        step["pattern"] = {"Regex": regex}
    return [step]


def _merges(where: str, model: dict[str, Any]) -> list[tuple[str, str]]:
    """Merges as pairs, from pairs or from lines."""
    pairs = []
    for merge in model.get("merges") or ():
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if len(parts) != 2 or not all(isinstance(part, str) for part in parts):
            raise BadCheckpoint(where, f"merge {merge!r:.40} is not of two tokens", AGAIN)
        pairs.append((parts[0], parts[1]))
    return pairs
