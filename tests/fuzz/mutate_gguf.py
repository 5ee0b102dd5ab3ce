"""Damage to GGUF files: the counts, lengths, types, sizes and offsets of their head, one by one."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass

KEYS = (
    "split.count", "general.alignment", "general.architecture", "llama.rope.scaling.type",
    "llama.rope.scaling.factor", "llama.rope.scale_linear", "llama.attention.sliding_window",
    "llama.rope.scaling.original_context_length", "llama.vocab_size", "llama.attention.value_length",
    "llama.rope.dimension_count", "llama.expert_count", "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.scores", "tokenizer.ggml.unknown_token_id", "tokenizer.chat_template",
    "tokenizer.ggml.add_bos_token", "tokenizer.ggml.pre", "general.sampling.temp",
    "general.sampling.top_k", "a\nb", "",
)  # fmt: skip
TENSORS = (
    "rope_freqs.weight",
    "output.weight",
    "blk.0.attn_q.bias",
    "blk.9.attn_q.weight",
    "",
    "v",
)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}  # fmt: skip


@dataclass(frozen=True)
class Number:
    """A number of the head: where it is, its struct code, and what it says."""

    offset: int
    code: str
    what: str


@dataclass(frozen=True)
class Text:
    """A string of the head: where its u64 length is, and its bytes."""

    offset: int
    data: bytes
    what: str


@dataclass(frozen=True)
class Pair:
    """A metadata pair: its key, and where its type and value lie."""

    key: str
    start: int
    end: int


@dataclass(frozen=True)
class Head:
    """What walk finds. table, end: where the table of tensors begins and ends, 0 if not reached."""

    numbers: list[Number]
    texts: list[Text]
    pairs: list[Pair]
    table: int = 0
    end: int = 0

    def rebuilt(self, data: bytes, changed: bytes) -> bytes:
        """The file with another head: its data stay aligned, so that only the head is wrong."""
        if not self.end:
            return changed
        return changed + bytes(-len(changed) % 32) + data[-(-self.end // 32) * 32 :]


def walk(data: bytes) -> Head:
    """The head of a sound file; what could be read of a damaged one."""
    numbers = [Number(4, "I", "version"), Number(8, "Q", "tensors"), Number(16, "Q", "pairs")]
    texts: list[Text] = []
    found: list[Pair] = []
    at, table, end = 24, 0, 0

    def number(code: str, what: str) -> int:
        nonlocal at
        found = struct.unpack_from("<" + code, data, at)[0]
        numbers.append(Number(at, code, what))
        at += struct.calcsize("<" + code)
        return int(found) if code not in "fd" else 0

    def text(what: str) -> str:
        nonlocal at
        start = at
        length = number("Q", f"length of {what}")
        if length > 1 << 20:
            raise ValueError("damaged already")
        texts.append(Text(start, data[at : at + length], what))
        at += length
        return data[start + 8 : at].decode("utf-8", "replace")

    def value(kind: int, key: str) -> None:
        if kind == 8:
            text(f"value of {key}")
        elif kind == 9:
            item, count = number("I", f"item type of {key}"), number("Q", f"items of {key}")
            if count > 1 << 16:
                raise ValueError("damaged already")
            for _ in range(count):
                value(item, key)
        else:
            number(SCALARS[kind], f"value of {key}")

    try:
        tensors, pairs = struct.unpack_from("<QQ", data, 8)
        for _ in range(min(pairs, 1 << 12)):
            key = text("a key")
            start = at
            value(number("I", f"type of {key}"), key)
            found.append(Pair(key, start, at))
        table = at
        for _ in range(min(tensors, 1 << 12)):
            name = text("a tensor's name")
            for _ in range(min(number("I", f"dimensions of {name}"), 8)):
                number("Q", f"size of {name}")
            number("I", f"type of {name}")
            number("Q", f"offset of {name}")
        end = at
    except (struct.error, ValueError, KeyError, RecursionError):
        pass
    whole = [n for n in numbers if n.offset + struct.calcsize("<" + n.code) <= len(data)]
    return Head(whole, texts, found, table, end)


def gguf_marks(data: bytes) -> list[int]:
    """Offsets of the head's numbers, the first and last hundreds of them."""
    numbers = walk(data).numbers
    return [number.offset for number in (*numbers[:200], *numbers[-200:])]


def mutate_gguf(data: bytes, draw: random.Random) -> tuple[bytes, str]:
    """The file with one number or string of its head changed, and what."""
    head = walk(data)
    if not head.numbers:
        return data + b"\0", "a byte added"
    kind = draw.random()
    if head.pairs and kind < 0.3:
        return _value(data, head, draw.choice(head.pairs), draw)
    if head.end and kind < 0.4:
        return _pair(data, head, draw)
    if head.end and kind < 0.45:
        return _tensor(data, head, draw)
    if head.texts and kind < 0.6:
        return _text(data, head, draw.choice(_weighted(head.texts, draw)), draw)
    chosen = draw.choice(_weighted(head.numbers, draw))
    wide = struct.calcsize("<" + chosen.code)
    if chosen.code in "fd":
        new = struct.pack(
            "<" + chosen.code, draw.choice([0.0, -1.0, float("nan"), float("inf"), 1e30])
        )
        return _put(data, chosen.offset, new), f"{chosen.what} is {new.hex()}"
    old = int.from_bytes(data[chosen.offset : chosen.offset + wide], "little")
    top = (1 << (8 * wide)) - 1
    close = [old + 1, old - 1, old * 2, old // 2, old ^ 1 << draw.randrange(8 * wide)]
    other = draw.choice([*close, 0, 1, 2, 3, 8, 9, 12, 13, 31, 33, top, top >> 1, (top >> 1) + 1, 1 << 20]) & top  # fmt: skip
    new = other.to_bytes(wide, "little")
    return _put(data, chosen.offset, new), f"{chosen.what} is {other}, not {old}"


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _typed(draw: random.Random) -> bytes:
    """A sound value of any type: its type and itself."""
    array = struct.pack("<I", 9)
    ints = struct.pack("<IQ2i", 5, 2, -1, 7)
    return draw.choice(
        [
            struct.pack("<II", 4, draw.choice([0, 1, 2, 7, 1 << 20, (1 << 32) - 1])),
            struct.pack("<Ii", 5, -5),
            struct.pack("<IQ", 10, draw.choice([0, 1 << 40, (1 << 64) - 1])),
            struct.pack("<If", 6, draw.choice([0.0, -1.0, 1e30, float("nan"), float("inf")])),
            struct.pack("<Id", 12, 1e300),
            struct.pack("<IB", 7, draw.choice([0, 1, 255])),
            struct.pack("<I", 8) + _string(draw.choice([b"", b"x", b"4", b"a\nb", b"x" * 9000])),
            array + ints,
            array + struct.pack("<IQ", 4, 0),
            array + struct.pack("<IQ", 8, 2) + _string(b"a") + _string(b"a"),
            array + struct.pack("<IQ2f", 6, 2, float("nan"), 0.5),
            array + struct.pack("<IQ", 9, 1) + ints,
        ]
    )


def _value(data: bytes, head: Head, chosen: Pair, draw: random.Random) -> tuple[bytes, str]:
    """A value of another type in the place of a pair's."""
    new = _typed(draw)
    what = f"value of {chosen.key} is {new[:24]!r}"
    changed = data[: chosen.start] + new + data[chosen.end : head.end or None]
    return head.rebuilt(data, changed), what


def _pair(data: bytes, head: Head, draw: random.Random) -> tuple[bytes, str]:
    """A pair more, of a key that readers know."""
    key, (count,) = draw.choice(KEYS), struct.unpack_from("<Q", data, 16)
    pair = _string(key.encode()) + _typed(draw)
    counted = struct.pack("<Q", count + 1 & (1 << 64) - 1)
    changed = data[:16] + counted + pair + data[24 : head.end]
    return head.rebuilt(data, changed), f"a pair {pair[:60]!r} more"


def _tensor(data: bytes, head: Head, draw: random.Random) -> tuple[bytes, str]:
    """A tensor more, without data of its own."""
    name, (count,) = draw.choice(TENSORS), struct.unpack_from("<Q", data, 8)
    sizes = draw.choice([(16,), (32,), (0,), (16, 2), (128, 64), (1 << 32, 1 << 32), (1, 1, 1, 1)])
    entry = _string(name.encode()) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    entry += struct.pack("<IQ", draw.choice([0, 1, 2, 8, 12, 24, 30, 99]), draw.choice([0, 32]))
    counted = struct.pack("<Q", count + 1 & (1 << 64) - 1)
    changed = data[:8] + counted + data[16 : head.table] + entry + data[head.table : head.end]
    return head.rebuilt(data, changed), f"a tensor {name} of {sizes} more"


def _weighted(found: list, draw: random.Random) -> list:
    """Mostly what describes the file and its tensors; tokens are the bulk, and matter less."""
    plain = [item for item in found if "tokenizer" not in item.what]
    return plain if plain and draw.random() < 0.8 else found


def _text(data: bytes, head: Head, chosen: Text, draw: random.Random) -> tuple[bytes, str]:
    """A string made longer, shorter, another, or no UTF-8."""
    old = chosen.data
    new = draw.choice([b"", old + b"\n", old[:-1], b"\xff" * max(len(old), 1), old.upper(), b"x" * 70_000, old + b"\0",
                       b"general.alignment", b"llama.block_count", b"token_embd.weight", b"qwen2", b"blk.0.attn_q.bias"])  # fmt: skip
    end = chosen.offset + 8 + len(old)
    changed = data[: chosen.offset] + _string(new) + data[end : head.end or None]
    what = f"{chosen.what} is {new[:30]!r}, not {old[:30]!r}"
    return head.rebuilt(data, changed), what


def _put(data: bytes, offset: int, new: bytes) -> bytes:
    return data[:offset] + new + data[offset + len(new) :]
