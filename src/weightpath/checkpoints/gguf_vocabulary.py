"""tokenizer.json and its companions as GGUF metadata: the way back of gguf_tokenizer.

    tokens and types by id    1 normal, 2 unknown, 3 control, 4 kept whole, 5 unused, 6 byte
    splits, merges, scores    see gguf_merges
    special ids, first and last token, chat templates, end tokens and sampling of generation

What is written is read back at once and run over texts and special tokens beside the original: ids
that differ are an error here, since llama.cpp would give no message later.
Source: llama.cpp's vocabulary reader and converter; the tokenizers package's JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf.constants import GGUFValueType
from tokenizers import Tokenizer

from weightpath.checkpoints.gguf_config import SAMPLING
from weightpath.checkpoints.gguf_merges import AGAIN, KEEP, byte_level, sentencepiece
from weightpath.checkpoints.gguf_metadata import Values
from weightpath.checkpoints.gguf_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    tokenizer_files,
)
from weightpath.checkpoints.shards import read_json
from weightpath.errors import BadCheckpoint

TEXTS = (
    "Hello, world! I'VE been told they'd come, it's 12345 and 3.14159.",
    "def f(x):\n    return {'a': [x**2, -1]}  # done\n\n\n\tif a!=b: pass\r\n",
    "  leading,   inner    and trailing spaces   ",
    "Füße naïve Ångström Жизнь 東京タワー ไทย 한국어 العربية 🙂👍🏽 e=mc²",
    "CamelCase snake_case http://a.b/c?d=e&f=1 10,000.00 'quoted' “curly” …",
)
"""What both tokenizers must cut alike: contractions, digits, code, spaces, scripts, signs."""

_IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_ADDED_TRIED = 64
_U32, _TEXT, _BOOL = GGUFValueType.UINT32, GGUFValueType.STRING, GGUFValueType.BOOL


def vocabulary_metadata(
    folder: Path, vocab_size: int, config: dict[str, Any]
) -> tuple[Values, tuple[str, ...]]:
    """GGUF keys for the tokenizer in a checkpoint's folder, and notes on what they leave out.

    vocab_size: rows of the embedding; an id without a token gets one that is marked unused.
    config: config.json, for token ids that the tokenizer does not name.
    Errors: BadCheckpoint for a tokenizer that GGUF has no name for, or that it would change.
    """
    path = folder / "tokenizer.json"
    where, stated = str(path), read_json(path)
    settings = _optional(folder / "tokenizer_config.json")
    model = stated.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else model
        raise BadCheckpoint(where, f"is a {kind!r:.40} tokenizer; BPE is written as GGUF", KEEP)
    original = _tokenizer(where, _text(path))
    vocabulary, added = original.get_vocab(), stated.get("added_tokens") or []
    tokens = _tokens(where, vocabulary, vocab_size)
    if model.get("byte_fallback"):
        values, notes = sentencepiece(where, stated, model, vocabulary, vocab_size), []
    else:
        values, notes = byte_level(where, stated, model)
    special = _special_ids(where, folder, settings, config, vocabulary, len(tokens))
    types = [NORMAL if token in vocabulary else UNUSED for token in tokens]
    for entry in added:
        if vocabulary.get(entry["content"]) != entry["id"]:
            found = f"{entry['content']!r:.40} as {entry['id']}"
            raise BadCheckpoint(where, f"adds token {found}, which it does not get", AGAIN)
        types[entry["id"]] = CONTROL if entry.get("special") else USER_DEFINED
        if entry.get("lstrip") or entry.get("rstrip") or entry.get("single_word"):
            notes.append(f"how {entry['content']!r:.40} takes the text beside it is left out")
    if model.get("byte_fallback"):
        for byte in range(256):
            types[vocabulary[f"<0x{byte:02X}>"]] = BYTE
        if "unk" in special:
            types[special["unk"]] = UNKNOWN
    values["tokenizer.ggml.tokens"] = (GGUFValueType.ARRAY, tokens)
    values["tokenizer.ggml.token_type"] = (GGUFValueType.ARRAY, types)
    for kind, index in special.items():
        values[f"tokenizer.ggml.{_IDS[kind]}_token_id"] = (_U32, index)
    values |= _ends(where, original, settings, special, notes)
    values |= _generation(folder, config, special["eos"], len(tokens), notes)
    for name, template in _chat_templates(folder, settings).items():
        key = "tokenizer.chat_template" + ("" if name == "default" else f".{name}")
        values[key] = (_TEXT, template)
    _prove(where, original, values, added)
    return values, tuple(notes)


def _tokens(where: str, vocabulary: dict[str, int], vocab_size: int) -> list[str]:
    """Every id's token, [PADn] where there is none: llama.cpp wants one for each embedding row."""
    top = max(vocabulary.values(), default=-1)
    if not 0 <= top < vocab_size:
        found = f"token ids up to {top}" if vocabulary else "no tokens"
        raise BadCheckpoint(where, f"has {found}, the embedding {vocab_size} rows", AGAIN)
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    for token, index in vocabulary.items():
        tokens[index] = token
    if len(set(tokens)) != len(tokens) or len(set(vocabulary.values())) != len(vocabulary):
        raise BadCheckpoint(where, "gives one id two tokens, or a token two ids", KEEP)
    return tokens


def _special_ids(
    where: str,
    folder: Path,
    settings: dict[str, Any],
    config: dict[str, Any],
    vocabulary: dict[str, int],
    size: int,
) -> dict[str, int]:
    """Ids of bos, eos, unk and pad, as the tokenizer's files name them, else as the config does."""
    mapped = _optional(folder / "special_tokens_map.json")
    found: dict[str, int] = {}
    for kind in _IDS:
        token = settings.get(f"{kind}_token") or mapped.get(f"{kind}_token")
        token = token.get("content") if isinstance(token, dict) else token
        index = _first(config.get(f"{kind}_token_id"))
        if token is not None:
            index = vocabulary.get(token) if isinstance(token, str) else None
        if index is None and token is None:
            continue
        if index is None or not 0 <= index < size:
            raise BadCheckpoint(where, f"has no {kind} token {token or index!r:.40}", AGAIN)
        found[kind] = index
    if "eos" not in found:  # llama.cpp would take token 11 or 2 for it
        raise BadCheckpoint(
            where, "names no end-of-text token", "set eos_token in tokenizer_config.json"
        )
    return found


def _ends(
    where: str,
    original: Tokenizer,
    settings: dict[str, Any],
    special: dict[str, int],
    notes: list[str],
) -> Values:
    """Whether a first and a last token go around a text: the config's word, else what is done."""
    text = "a"
    inner = original.encode(text, add_special_tokens=False).ids
    outer = original.encode(text).ids
    at = next((i for i in range(len(outer)) if outer[i : i + len(inner)] == inner), None)
    before, after = (outer[:at], outer[at + len(inner) :]) if at is not None else (outer, [])
    values: Values = {}
    for kind, around in (("bos", before), ("eos", after)):
        if around not in ([], [special.get(kind)]):
            raise BadCheckpoint(
                where, f"puts tokens {around} around a text, GGUF one bos and one eos", KEEP
            )
        done, stated = bool(around), settings.get(f"add_{kind}_token")
        if isinstance(stated, bool) and stated != done and (kind in special or not stated):
            notes.append(
                f"tokenizer_config.json says add_{kind}_token {str(stated).lower()}, and "
                "tokenizer.json does otherwise: written as the former says"
            )
            done = stated
        values[f"tokenizer.ggml.add_{kind}_token"] = (_BOOL, done)
    return values


def _generation(
    folder: Path, config: dict[str, Any], eos: int, size: int, notes: list[str]
) -> Values:
    """Further end tokens as eot and eom, and the sampling settings."""
    settings = _optional(folder / "generation_config.json")
    stated = settings.get("eos_token_id", config.get("eos_token_id"))
    ids = stated if isinstance(stated, list) else [stated]
    sound = (i for i in ids if type(i) is int and 0 <= i < size and i != eos)
    further = list(dict.fromkeys(sound))
    values: Values = {}
    for kind, index in zip(("eot", "eom"), further, strict=False):
        values[f"tokenizer.ggml.{kind}_token_id"] = (_U32, index)
    if len(further) > 2:
        notes.append(f"end tokens {further[2:]} are left out: GGUF has eos, eot and eom")
    for key, hf in SAMPLING.items():
        value = settings.get(hf)
        if not settings.get("do_sample") or isinstance(value, bool):
            continue
        if isinstance(value, int) or (isinstance(value, float) and key != "top_k"):
            if not abs(value) < 1 << 31:
                where = str(folder / "generation_config.json")
                raise BadCheckpoint(where, f"{hf} is {value!r:.40}", AGAIN)
            kind = GGUFValueType.INT32 if key == "top_k" else GGUFValueType.FLOAT32
            values[f"general.sampling.{key}"] = (kind, value)
    return values


def _chat_templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Template by name; the file beside the tokenizer wins over tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    stated = _text(path) if path.is_file() else settings.get("chat_template")
    if isinstance(stated, str):
        found = {"default": stated}
    else:
        found = {
            str(entry["name"]): entry["template"]
            for entry in (stated if isinstance(stated, list) else [])
            if isinstance(entry, dict)
            and isinstance(entry.get("template"), str)
            and str(entry.get("name", "")).isidentifier()
        }
    for template in found.values():
        if any("\ud800" <= sign <= "\udfff" for sign in template):
            raise BadCheckpoint(str(folder), "has a chat template that is no Unicode text", AGAIN)
    return found


def _prove(where: str, original: Tokenizer, values: Values, added: list[dict[str, Any]]) -> None:
    """BadCheckpoint unless the vocabulary, read back, gives the original's ids."""
    plain = {key: value for key, (_, value) in values.items()}
    again = Tokenizer.from_str(tokenizer_files(where, plain, 0)["tokenizer.json"])
    tried = [
        f"a{entry['content']}b"
        for entry in added[:_ADDED_TRIED]
        if not (entry.get("lstrip") or entry.get("rstrip") or entry.get("single_word"))
    ]
    for text in (*TEXTS, *tried):
        wanted = original.encode(text, add_special_tokens=False).ids
        found = again.encode(text, add_special_tokens=False).ids
        if found != wanted:
            at = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), 0)
            raise BadCheckpoint(
                where,
                f"would cut {text[:24]!r} otherwise as GGUF: token {at} becomes "
                f"{found[at : at + 1]}, was {wanted[at : at + 1]}",
                KEEP,
            )


def _tokenizer(where: str, text: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the package raises nothing narrower
        raise BadCheckpoint(where, f"is no tokenizer ({str(error)[:80]})", AGAIN) from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadCheckpoint(str(path), f"is not UTF-8 (byte {error.start})", AGAIN) from None


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _first(value: Any) -> int | None:
    value = value[0] if isinstance(value, list) and value else value
    return value if type(value) is int else None
