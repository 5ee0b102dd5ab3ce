"""Damage to JSON files: configs, the index of shards, and what stands beside them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

SETTINGS = ("config.json", "quant_config.json", "quantize_config.json", "hf_quant_config.json")
METHODS = (
    "awq", "gptq", "auto-round", "compressed-tensors", "torchao", "modelopt", "bitsandbytes", "hqq",
    "fp8", "",
)  # fmt: skip
KEYS = (
    "bits", "w_bit", "group_size", "q_group_size", "sym", "zero_point", "desc_act", "version",
    "checkpoint_format", "format", "pack_dtype", "packing_format", "quant_method", "config_groups",
    "ignore", "num_bits", "type", "strategy", "symmetric", "actorder", "quant_algo", "hidden_size",
    "num_attention_heads", "num_key_value_heads", "model_type", "architectures", "vocab_size",
    "num_hidden_layers", "dtype", "torch_dtype", "data_type", "backend", "static_groups", "meta",
    "dynamic", "extra_config", "exclude_modules", "modules_to_not_convert", "tie_word_embeddings",
    "head_dim", "lm_head", "block_name_to_quantize", "text_config", "rope_parameters",
    "rope_theta", "rope_scaling", "rms_norm_eps", "layer_types", "sliding_window",
    "max_position_embeddings", "eos_token_id", "hidden_act", "intermediate_size",
)  # fmt: skip
"""Keys that a reader looks at; they are damaged more often than the rest."""
BOMBS = (
    "(.+)+!", "(.*)*(.*)*x", ".*.*.*.*.*.*.*.*.*.*x", "(a|a)*$", "(?:m|mo|mod|[a-z.])*!", "[", "(?P<",
    "\\", "(" * 200, "*", "re:(.+)+!", "(?=.*)*", ".{1,99999}.{1,99999}!", "((((.*)*)*)*)*!",
    "*a*" * 60 + "!", "(?:.?){60}.{60}", "\n", "(.)\\1*\\1*\\1*!", "re:model\\.(\\w+\\.?)+!",
    "(m?o?d?e?l?\\.?[a-z0-9_]*)*!",
)  # fmt: skip
"""Patterns that are none, or whose matching may take for ever."""
RAW = {
    "@deep": "[" * 100_000 + "]" * 100_000,
    "@deeper": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "@digits": "1" * 5000,
    "@exponent": "1e999",
    "@nan": "NaN",
    "@infinity": "-Infinity",
    "@long": '"' + "x" * 200_000 + '"',
    "@list": "[" + "0," * 50_000 + "0]",
}
"""What json.dumps would not write, put in as text."""
JUNK: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 3, 5, 7, 9, 16, 33, 1 << 16, 1 << 30, 1 << 31, 1 << 63, 1 << 64, -(1 << 63), 10**30,
    1e308, 0.5, 4.0, -0.0, "", "4", "nul\0", "line\nbreak", "\ud800", "../../x", "é" * 50, "x" * 5000,
    [], {}, [[]], [None], [1, 2], {"a": 1}, {"": {}}, [[[[[[[[]]]]]]]], ["model"], *RAW,
)  # fmt: skip


def wants_settings(name: str) -> bool:
    return name in SETTINGS


def hostile(old: Any, draw: random.Random) -> Any:
    """A value in the place of `old`: close to it, of another kind, or far off."""
    if draw.random() < 0.4:
        if isinstance(old, bool):
            return not old
        if isinstance(old, int):
            return draw.choice([old + 1, old - 1, old * 2, old // 2, -old, float(old), str(old)])
        if isinstance(old, str):
            return draw.choice([old.upper(), old + "\n", old[:-1], [old], "x" + old, old * 100])
        if isinstance(old, list):
            return draw.choice([old * 2, old[::-1], old[1:], {"0": old}, [old], [*old, None]])
        if isinstance(old, dict):
            return draw.choice([list(old), list(old.items()), {}, {**old, "x": old}])
    return draw.choice(JUNK)


def mutate_json(name: str, data: bytes, draw: random.Random) -> tuple[bytes, str]:
    """A JSON file with something in it changed, and what."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return data[: len(data) // 2], "cut in half"
    if not isinstance(content, dict):
        return b"{}", "made an empty object"
    actions: list[Callable[[dict[str, Any], random.Random], str]] = [_value, _value, _value, _key]
    if "weight_map" in content:
        actions += [_index] * 6
    elif wants_settings(name):
        actions += [_settings, _settings, _bomb, _bomb, _nest]
    if draw.random() < 0.05:
        whole = draw.choice(("[]", "null", "3", '"x"', RAW["@deep"], "NaN", "{", "", "\ufeff{}"))
        return whole.encode(), f"made {whole[:10]!r}"
    what = draw.choice(actions)(content, draw)
    text = dumped(content)
    if draw.random() < 0.05 and len(content):
        key = draw.choice(list(content))
        text = f"{{{json.dumps(key)}: {dumped(hostile(content[key], draw))}, {text[1:]}"
        what += f"; key {key!r} given twice"
    return text.encode("utf-8", "surrogatepass"), what


def dumped(content: Any) -> str:
    """JSON, with the texts of RAW in place of their names."""
    text = json.dumps(content)
    for mark, raw in RAW.items():
        text = text.replace(json.dumps(mark), raw)
    return text


def _spots(content: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    """Every container and key or place in it, as far as 6 levels down."""
    if depth > 6 or not isinstance(content, dict | list):
        return []
    items = list(content.items() if isinstance(content, dict) else enumerate(content))
    own = [(content, key) for key, _ in items]
    return own + [spot for _, value in items[:50] for spot in _spots(value, depth + 1)]


def _value(content: dict[str, Any], draw: random.Random) -> str:
    spots = _spots(content)
    if not spots:
        return "nothing in it to change"
    weights = [5 if key in KEYS else 1 for _, key in spots]
    container, key = draw.choices(spots, weights)[0]
    if draw.random() < 0.15:
        del container[key]
        return f"{str(key)[:40]!r} removed"
    container[key] = hostile(container[key], draw)
    return f"{str(key)[:40]!r} set to {str(container[key])[:40]!r}"


def _key(content: dict[str, Any], draw: random.Random) -> str:
    """A key that was not there, or one under another name."""
    places = [content, *(value for value in content.values() if isinstance(value, dict))]
    place = draw.choice(places)
    if place and draw.random() < 0.5:
        old = draw.choice(list(place))
        place[draw.choice([old.upper(), old + " ", "", "\n", "x" * 300])] = place.pop(old)
        return f"{old[:40]!r} renamed"
    key = draw.choice(KEYS)
    place[key] = draw.choice(JUNK)
    return f"{key!r} set to {str(place[key])[:40]!r}"


def _quantization(content: dict[str, Any]) -> dict[str, Any]:
    """Where the quantization settings stand."""
    nested = content.get("text_config")
    for section in (content, nested if isinstance(nested, dict) else {}):
        found = section.get("quantization_config")
        if isinstance(found, dict):
            return found
    inner = content.get("quantization")
    return inner if isinstance(inner, dict) else content


def _settings(content: dict[str, Any], draw: random.Random) -> str:
    """Another method, width or group size, as a mislabelled file has."""
    place = _quantization(content)
    key = draw.choice(["quant_method", "bits", "group_size", "num_bits", *KEYS[:12]])
    plausible = {
        "quant_method": METHODS,
        "bits": (2, 3, 4, 5, 6, 7, 8, 1, 16, 32),
        "group_size": (-1, 8, 16, 32, 48, 64, 128, 256, 1 << 20),
        "version": ("gemm", "gemv", "gemv_fast", "llm-awq", "marlin"),
        "checkpoint_format": ("gptq", "gptq_v2", "gptq_p", "marlin", None),
        "packing_format": ("auto_round:auto_gptq", "auto_round", "auto_round:auto_awq",
                           "auto_round:llm_compressor"),
        "pack_dtype": ("int8", "int16", "int32", "int64", "float32"),
    }  # fmt: skip
    place[key] = draw.choice(plausible.get(key.removeprefix("num_"), JUNK))
    return f"setting {key!r} is {str(place[key])[:40]!r}"


def _bomb(content: dict[str, Any], draw: random.Random) -> str:
    """A pattern that hangs or breaks its reader, wherever patterns or names may stand."""
    place, bomb = _quantization(content), draw.choice(BOMBS)
    group = {"targets": [f"re:{bomb}"], "weights": {"num_bits": 4, "group_size": 32}}
    changes: tuple[dict[str, Any], ...] = (
        {"dynamic": {bomb: {"bits": 8}}},
        {"dynamic": {f"-:{bomb}": {}}},
        {"dynamic": {f"+:{bomb}": {"group_size": 64}}},
        {"extra_config": {bomb: {"bits": 8}}},
        {"ignore": [f"re:{bomb}"]},
        {"ignore": [bomb]},
        {"config_groups": {"group_0": group}},
        {"exclude_modules": [bomb]},
        {"modules_to_not_convert": [bomb]},
        {"block_name_to_quantize": bomb},
    )
    change = draw.choice(changes)
    place.update(change)
    return f"pattern in {next(iter(change))}: {bomb[:30]!r}"


def _nest(content: dict[str, Any], draw: random.Random) -> str:
    """The settings somewhere else: in a section, twice and different, or gone."""
    found = content.pop("quantization_config", {"bits": 4})
    action = draw.choice(("moved", "doubled", "deep", "gone", "compression"))
    if action == "moved":
        content["text_config"] = {"quantization_config": found}
    elif action == "doubled":
        content["quantization_config"] = found
        content["vision_config"] = {"quantization_config": {"quant_method": draw.choice(METHODS)}}
    elif action == "deep":
        for _ in range(400):
            found = {"text_config": found}
        content["text_config"] = found
    elif action == "compression":
        content["compression_config"] = found
    return f"settings {action}"


def _index(content: dict[str, Any], draw: random.Random) -> str:
    """The index: files that are not there, outside or of another kind; tensors moved or missing."""
    table = content["weight_map"]
    if not isinstance(table, dict) or not table:
        content["weight_map"] = {}
        return "weight_map emptied"
    name = draw.choice(list(table))
    action = draw.choice(("file", "file", "moved", "dropped", "added", "all"))
    files = (
        "../model.safetensors", "/etc/passwd", "none.safetensors", "", ".", "config.json", 7, None,
        ["model.safetensors"], "a\0b.safetensors", "a\nb.safetensors", "x" * 300 + ".safetensors",
    )  # fmt: skip
    if action == "file":
        table[name] = draw.choice(files)
    elif action == "moved":
        table[name] = draw.choice([str(file) for file in table.values()])
    elif action == "dropped":
        del table[name]
    elif action == "added":
        table[draw.choice(["ghost.weight", "", "a\nb", name + ".x"])] = table[name]
    else:
        content["weight_map"] = dict.fromkeys(table, table[name])
    return f"index: {action} {name}"
