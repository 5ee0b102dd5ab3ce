"""Damage to safetensors files by those who can read them: entries of the header, and tensors.

Entries are changed over data that stay (a header that lies), or tensors are changed and the file is
built anew around them (a sound file of the wrong tensors).
"""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable
from typing import Any

from mutate_json import dumped, hostile

SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}  # fmt: skip
OTHER = ("F8_E4M3", "F8_E5M2", "U16", "U32", "U64", "C64", "f32", "", "X")
NAMES = (
    "", "a\nb", "\0", "..", "model.model.x", "x" * 5000, "weight", ".weight", "lm_head.qweight",
    "model.embed_tokens.weight", "\ud800", "__metadata__", "a..b.weight_packed",
)  # fmt: skip

Tensors = dict[str, tuple[str, list[int], bytes]]


def parsed(data: bytes) -> tuple[dict[str, Any], bytes] | None:
    """Header and data, or None where it is no such file any more."""
    if len(data) < 8:
        return None
    (length,) = struct.unpack("<Q", data[:8])
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError, OverflowError):
        return None
    if not isinstance(header, dict) or not all(_whole(header[name]) for name in _names(header)):
        return None
    return header, data[8 + length :]


def built(header: dict[str, Any], body: bytes) -> bytes:
    text = dumped(header).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def safetensors_marks(data: bytes) -> list[int]:
    """Offsets of the header's end and of every tensor's ends."""
    found = parsed(data)
    if found is None:
        return []
    header, body = found
    start = len(data) - len(body)
    return [
        start,
        *(start + end for name in _names(header) for end in header[name]["data_offsets"]),
    ]


def mutate_safetensors(data: bytes, draw: random.Random) -> tuple[bytes, str]:
    """The file with one thing changed, and what."""
    found = parsed(data)
    if found is None or not _names(found[0]):
        return data + b"\0", "a byte added"
    header, body = found
    if draw.random() < 0.1:
        return _length(data, draw)
    if draw.random() < 0.4:
        action = draw.choice((_dtype, _shape, _shape, _offsets, _offsets, _rename, _drop, _metadata, _entry))  # fmt: skip
        what = action(header, draw)
        if draw.random() < 0.05:  # the last of two entries of one name
            name = draw.choice(_names(header) or ["x"])
            text = dumped(header)
            entry = dumped(header.get(name, {}))
            raw = f"{{{json.dumps(name)}: {entry}, {text[1:]}".encode("utf-8", "surrogatepass")
            return struct.pack("<Q", len(raw)) + raw + body, f"{what}; {name[:60]!r} given twice"
        return built(header, body), what
    tensors: Tensors = {
        name: (entry["dtype"], entry["shape"], body[slice(*entry["data_offsets"])])
        for name in _names(header)
        for entry in (header[name],)
    }
    actions: tuple[Callable[[Tensors, str, random.Random], str], ...] = (
        _lose, _move, _reshape, _reshape, _slice, _slice, _retype, _values, _values, _copy,
    )  # fmt: skip
    action, name = draw.choice(actions), _pick(tensors, draw)
    what, again = "", 1
    if draw.random() < 0.3:  # the same to all tensors of its kind
        alike = [other for other in tensors if other.rpartition(".")[2] == name.rpartition(".")[2]]
        state, again = draw.getstate(), len(alike)
        for other in alike:
            draw.setstate(state)
            what = action(tensors, other, draw)
    else:
        what = action(tensors, name, draw)
    rest = f", and {again - 1} more" if again > 1 else ""
    return rebuilt(tensors, header.get("__metadata__")), what + rest


def rebuilt(tensors: Tensors, metadata: Any) -> bytes:
    """A sound file of these tensors, but for what their own shapes lie."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    body = bytearray()
    for name, (dtype, shape, data) in tensors.items():
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        body += data
    return built(header, bytes(body))


def _whole(entry: Any) -> bool:
    """Whether an entry is as it should be, so that it can be damaged on purpose."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        return False
    numbers = (entry["shape"], entry["data_offsets"])
    return (
        all(isinstance(n, list) and all(type(i) is int for i in n) for n in numbers)
        and str(entry["dtype"]) in SIZES
        and len(entry["data_offsets"]) == 2
        and 0 <= entry["data_offsets"][0] <= entry["data_offsets"][1] < 1 << 40
    )


def _names(header: dict[str, Any]) -> list[str]:
    return [name for name in header if name != "__metadata__"]


def _pick(header: dict[str, Any], draw: random.Random) -> str:
    """A tensor; parts of low-bit linears more often than the rest."""
    names = _names(header)
    return draw.choices(names, [4 if "_proj" in name else 1 for name in names])[0]


def _length(data: bytes, draw: random.Random) -> tuple[bytes, str]:
    (length,) = struct.unpack("<Q", data[:8])
    other = draw.choice([0, 1, length - 1, length + 1, length + 8, len(data), len(data) - 8, 1 << 20, 1 << 31, 1 << 63, (1 << 64) - 1])  # fmt: skip
    return struct.pack("<Q", max(other, 0)) + data[8:], f"header length {other}"


# --- the header alone -------------------------------------------------------------------------


def _dtype(header: dict[str, Any], draw: random.Random) -> str:
    name = _pick(header, draw)
    header[name]["dtype"] = dtype = draw.choice([*SIZES, *OTHER, None, 3, ["F16"]])
    return f"dtype of {name} is {dtype!r}"


def _shape(header: dict[str, Any], draw: random.Random) -> str:
    name = _pick(header, draw)
    entry = header[name]
    shape = list(entry["shape"])
    if shape and draw.random() < 0.6:
        place = draw.randrange(len(shape))
        shape[place] = hostile(shape[place], draw)
        entry["shape"] = shape
    else:
        entry["shape"] = draw.choice([shape[::-1], [], [0], [*shape, 1], [*shape, 0], [1 << 32, 1 << 32],
                                      [(1 << 63) - 1, 4], [-1, -1], None, "2", {"0": 1}, [shape]])  # fmt: skip
    return f"shape of {name} is {str(entry['shape'])[:60]}"


def _offsets(header: dict[str, Any], draw: random.Random) -> str:
    name, other = _pick(header, draw), _pick(header, draw)
    entry = header[name]
    begin, end = entry["data_offsets"]
    if draw.random() < 0.3:
        entry["data_offsets"] = header[other]["data_offsets"]
        return f"{name} lies where {other} does"
    step = draw.choice([1, 2, 4, 64, -1, -4])
    entry["data_offsets"] = draw.choice([[begin + step, end + step], [begin, end + step], [end, begin], [-8, end],
                                         [begin, 1 << 62], [1 << 63, 1 << 63], [float(begin), end], [begin], [],
                                         None, [begin, begin], ["0", "4"], [begin, end, end], [True, end],
                                         [hostile(begin, draw), end], [begin, hostile(end, draw)]])  # fmt: skip
    return f"offsets of {name} are {str(entry['data_offsets'])[:60]}"


def _rename(header: dict[str, Any], draw: random.Random) -> str:
    name, other = _pick(header, draw), _pick(header, draw)
    if draw.random() < 0.5:
        header[name], header[other] = header[other], header[name]
        return f"{name} and {other} swapped"
    to = _new_name(name, draw)
    header[to] = header.pop(name)
    return f"{name} is called {to[:60]!r}"


def _new_name(name: str, draw: random.Random) -> str:
    ending = draw.choice(["qweight", "scales", "qzeros", "g_idx", "weight_packed", "weight_scale", "W_q", "SCB",
                          "weight_g_idx", "weight", "weight_scale_2", "bias", "_weight_qdata"])  # fmt: skip
    close = (f"model.{name}", f"{name}.x", name.upper(), name.replace("0", "1"))
    return draw.choice([*close, f"{name.rpartition('.')[0]}.{ending}", *NAMES])


def _drop(header: dict[str, Any], draw: random.Random) -> str:
    name = _pick(header, draw)
    del header[name]
    return f"{name} dropped from the header"


def _entry(header: dict[str, Any], draw: random.Random) -> str:
    name = _pick(header, draw)
    key = draw.choice(["dtype", "shape", "data_offsets", "", "extra"])
    if key == "":
        header[name] = hostile(header[name], draw)
        return f"entry of {name} is {str(header[name])[:40]!r}"
    header[name].pop(key, None)
    if draw.random() < 0.5:
        header[name][key] = hostile(None, draw)
    return f"{key} of {name} is {str(header[name].get(key))[:40]!r}"


def _metadata(header: dict[str, Any], draw: random.Random) -> str:
    """`__metadata__`, of which torchao's reader lives."""
    found = header.get("__metadata__")
    if isinstance(found, dict) and found and draw.random() < 0.8:
        key = draw.choice(list(found))
        inner = str(found[key])
        try:
            content = json.loads(inner)
        except ValueError:
            content = None
        if isinstance(content, dict) and content and draw.random() < 0.8:
            place = content.get("_data") if draw.random() < 0.6 else content
            place = place if isinstance(place, dict) and place else content
            changed = draw.choice(list(place))
            place[changed] = hostile(place[changed], draw)
            found[key] = dumped(content)
        else:
            found[key] = draw.choice([inner[:-1], "", "[" * 5000, "null", "7", 7, None, {}, "NaN"])
        return f"metadata of {key[:60]!r} is {str(found[key])[:60]!r}"
    header["__metadata__"] = draw.choice([None, [], 7, "x", {"a": 1}, {"a": None}, {"": ""}, {"tensor_names": "[]"}, {"tensor_names": '["a"]'}])  # fmt: skip
    return f"metadata is {header['__metadata__']!r}"


# --- sound files of wrong tensors -------------------------------------------------------------


def _lose(tensors: Tensors, name: str, draw: random.Random) -> str:
    del tensors[name]
    return f"{name} is gone"


def _move(tensors: Tensors, name: str, draw: random.Random) -> str:
    to = _new_name(name, draw)
    if to != "__metadata__":
        tensors[to] = tensors.pop(name)
    return f"{name} is stored as {to[:60]!r}"


def _copy(tensors: Tensors, name: str, draw: random.Random) -> str:
    to = _new_name(name, draw)
    if to != "__metadata__":
        tensors[to] = tensors[name]
    return f"{name} is stored as {to[:60]!r} too"


def _reshape(tensors: Tensors, name: str, draw: random.Random) -> str:
    """The same bytes under another shape that holds as many numbers."""
    dtype, shape, data = tensors[name]
    total = math.prod(shape)
    half = max(1, shape[0] // 2) if shape else 1
    choices = [shape[::-1], [total], [1, total], [total, 1], [*shape, 1], [1, *shape]]
    if total % half == 0:
        choices.append([half, total // half])
    tensors[name] = (dtype, draw.choice(choices), data)
    return f"{name} {shape} is reshaped to {tensors[name][1]}"


def _slice(tensors: Tensors, name: str, draw: random.Random) -> str:
    """Fewer or more rows, or one column less: consistent, but not what the others say."""
    dtype, shape, data = tensors[name]
    if not shape or not data:
        return "nothing"
    row = len(data) // max(shape[0], 1)
    rows = draw.choice([0, 1, shape[0] - 1, shape[0] + 1, shape[0] * 2, shape[0] // 2])
    column = SIZES[dtype]
    if len(shape) == 2 and shape[1] > 1 and draw.random() < 0.4:
        kept = [data[at : at + row - column] for at in range(0, len(data), row)]
        tensors[name] = (dtype, [shape[0], shape[1] - 1], b"".join(kept))
    else:
        longer = data + bytes(row) * max(0, rows - shape[0])
        tensors[name] = (dtype, [rows, *shape[1:]], longer[: rows * row])
    return f"{name} {shape} is cut to {tensors[name][1]}"


def _retype(tensors: Tensors, name: str, draw: random.Random) -> str:
    """The same bytes under another dtype, the last dimension fitted."""
    dtype, shape, data = tensors[name]
    to = draw.choice(list(SIZES))
    wide, last = SIZES[to], (shape[-1] if shape else 1) * SIZES[dtype]
    if shape and last % wide == 0:
        tensors[name] = (to, [*shape[:-1], last // wide], data)
    return f"{name} is {to}, not {dtype}"


def _values(tensors: Tensors, name: str, draw: random.Random) -> str:
    """Other numbers: noise, all ones, zeros, and what floats have at their ends."""
    dtype, shape, data = tensors[name]
    fills = {"zeros": b"\0", "ones": b"\xff", "sevens": b"\x77", "nan": b"\x00\x7e\xc0\x7f", "huge": b"\xff\x7b", "sign": b"\0\0\0\x80"}  # fmt: skip
    kind = draw.choice([*fills, "noise", "one"])
    if kind == "noise":
        changed = draw.randbytes(len(data))
    elif kind == "one" and data:
        place = draw.randrange(len(data))
        changed = data[:place] + b"\x7f" + data[place + 1 :]
    else:
        fill = fills.get(kind, b"\0")
        changed = (fill * (len(data) // len(fill) + 1))[: len(data)]
    tensors[name] = (dtype, shape, changed)
    return f"{name} holds {kind}"
