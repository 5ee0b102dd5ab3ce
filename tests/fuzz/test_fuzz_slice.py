"""A short slice of the soak, and that a case can be made again."""

from __future__ import annotations

import random
from pathlib import Path

import soak
from mutate import mutate

CASES = 150
SEED = 2026


def test_damaged_checkpoints_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    cases = soak.numbered(CASES, SEED, soak.VARIANTS)
    results = soak.soak(cases, tmp_path)
    assert len(results) == CASES
    wrong = soak.failures(results)
    assert not wrong, "\n".join(soak.told(result) for result in wrong)
    outcomes = [result.outcome for result in results]
    assert outcomes.count("read") > CASES // 20  # most damage is refused, not all
    assert outcomes.count("refused") > CASES // 3


def test_a_case_is_the_same_whenever_it_is_made(tmp_path: Path) -> None:
    for variant in ("gptq-v1 3 bits sharded", "gguf"):
        sound = soak.pristine(variant, tmp_path / variant)
        made = [
            mutate(sound.files, random.Random(f"{SEED}/{number}"))
            for number in (*range(40), *range(40))
        ]
        assert made[:40] == made[40:]
        assert len({what for _, what in made}) > 30
        assert sum(files != sound.files for files, _ in made) > 70
