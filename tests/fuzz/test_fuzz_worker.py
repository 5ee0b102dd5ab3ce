"""The soak sees what it looks for: a reader that does what no reader may is told on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import soak
from mutate_gguf import gguf_marks, mutate_gguf, walk
from mutate_json import RAW, dumped
from mutate_safetensors import built, parsed, rebuilt, safetensors_marks

PROGRAM = f"""
import sys
sys.path.insert(0, {str(soak.HERE)!r})
import worker
from weightpath.errors import BadCheckpoint
worker.open_low_bit = lambda path: exec((path / "do").read_text(), globals())
worker.main(int(sys.argv[1]))
"""
SAYING = "error = BadCheckpoint('a', 'b', 'c');"  # which cleans what it is given, so not args
SABOTAGE = {
    "raise BadCheckpoint('a', 'b', 'c')": "refused",
    "raise ValueError('x')": "uncaught ValueError",
    f"{SAYING} error.args = ('a\\nb',); raise error": "not one line",
    f"{SAYING} error.args = ('a\\x1b[2J',); raise error": "unprintable message",
    f"{SAYING} error.args = ('a\\ud800',); raise error": "unprintable message",
    f"{SAYING} error.args = ('b' * 3000,); raise error": "endless message",
    "import warnings; warnings.warn('x')": "warning UserWarning",
    "import torch; torch.empty(1 << 33, dtype=torch.uint8)": "uncaught RuntimeError",
    "bytearray(1 << 32)": "uncaught MemoryError",
    "import os, signal; os.kill(os.getpid(), signal.SIGBUS)": "died",
    "while True: pass": "hung",
}


@pytest.fixture(scope="module")
def sabotaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[soak.Worker]:
    program = tmp_path_factory.mktemp("program") / "sabotaged.py"
    program.write_text(PROGRAM)
    worker = soak.Worker(400 * soak.MEGABYTE, 60.0, program=program)
    yield worker
    worker.close()


def test_whatever_a_reader_may_not_do_is_a_failure_and_the_next_case_runs(
    sabotaged: soak.Worker, tmp_path: Path
) -> None:
    for body, outcome in SABOTAGE.items():
        if outcome == "hung":  # the process that died is replaced, and its imports take a while
            (tmp_path / "do").write_text("raise BadCheckpoint('a', 'b', 'c')")
            assert sabotaged.run(tmp_path, None, tmp_path / "out")["outcome"] == "refused"
            sabotaged.timeout = 1.0
        (tmp_path / "do").write_text(body)
        answer = sabotaged.run(tmp_path, None, tmp_path / "out")
        assert answer["outcome"] == outcome, (body, answer)
        assert (outcome in soak.ALLOWED) == (outcome == "refused")


def test_a_safetensors_file_is_taken_apart_and_built_again(tmp_path: Path) -> None:
    data = soak.pristine("torchao-int4", tmp_path).files["model.safetensors"]
    found = parsed(data)
    assert found is not None
    header, body = found
    assert parsed(built(header, body)) == found
    tensors = {
        name: (entry["dtype"], entry["shape"], body[slice(*entry["data_offsets"])])
        for name, entry in header.items()
        if name != "__metadata__"
    }
    again = parsed(rebuilt(tensors, header["__metadata__"]))
    assert again is not None
    assert again[0].keys() == header.keys()
    assert max(safetensors_marks(data)) == len(data)
    assert parsed(data[:100]) is None


def test_the_head_of_a_gguf_is_walked_to_its_end_and_its_data_stay_aligned(tmp_path: Path) -> None:
    data = soak.pristine("gguf", tmp_path).files["model.gguf"]
    head = walk(data)
    assert head.end > head.table > 24
    assert {"general.architecture", "tokenizer.ggml.tokens"} <= {pair.key for pair in head.pairs}
    assert b"output_norm.weight" in {text.data for text in head.texts}
    longer = data[: head.end] + b"x"
    assert head.rebuilt(data, longer)[-64:] == data[-64:]
    assert (len(head.rebuilt(data, longer)) - len(data)) % 32 == 0
    assert set(gguf_marks(data)) <= {number.offset for number in head.numbers}
    made = [mutate_gguf(data, random.Random(number))[0] for number in range(60)]
    assert sum(changed != data for changed in made) > 55


def test_texts_that_json_would_not_write_stand_in_it_as_they_are() -> None:
    assert dumped({"a": ["@nan", "@exponent"], "@nan": 1}) == '{"a": [NaN, 1e999], NaN: 1}'
    assert all(raw in dumped({"a": mark}) for mark, raw in RAW.items())
