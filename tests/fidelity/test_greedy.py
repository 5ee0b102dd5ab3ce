from __future__ import annotations

import json

import pytest
import torch
from transformers import GenerationConfig

from weightpath.errors import BadRequest
from weightpath.fidelity.greedy import (
    MINIMUM_PROMPTS,
    greedy_agreement,
    greedy_tokens,
    prompt_tokens,
    read_prompts,
    survival,
)


@pytest.fixture(scope="module")
def prompts():
    return read_prompts()


@pytest.fixture(scope="module")
def read_back(reference, candidate, tokenizer):
    return greedy_agreement(reference, candidate, tokenizer, max_new_tokens=24)


def test_the_shipped_prompts_are_varied_and_unique(prompts):
    assert len(prompts) >= 16
    assert len({p.name for p in prompts}) == len({p.prompt for p in prompts}) == len(prompts)


def test_reading_back_finds_what_writing_finds(reference, candidate, tokenizer, read_back):
    written = greedy_agreement(
        reference, candidate, tokenizer, max_new_tokens=24, method="generate"
    )
    assert [(r.agreed, r.diverged) for r in read_back.prompts] == [
        (r.agreed, r.diverged) for r in written.prompts
    ]
    assert read_back.k == written.k
    assert 0 < read_back.k < read_back.n  # else the comparison above would show little
    assert any(0 < r.agreed < 24 for r in read_back.prompts)


def test_equal_means_that_plain_generate_writes_the_same_text(
    reference, candidate, tokenizer, read_back
):
    def text(model, row):
        ids = prompt_tokens(tokenizer, row.prompt)[None]
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24
        )
        return tokenizer.decode(out[0, ids.shape[1] :])

    for row in read_back.prompts:
        assert text(reference, row) == row.reference_text
        assert (text(candidate, row) == row.reference_text) == (not row.diverged)
        assert text(candidate, row).startswith(row.candidate_text)


def test_a_model_reproduces_all_of_its_own_texts(reference, tokenizer):
    found = greedy_agreement(reference, reference, tokenizer, max_new_tokens=8)
    assert found.k == found.n == len(read_prompts())
    assert found.equal.value == found.equal_reference.value == 1.0
    assert found.survival == ((0, 1.0),)


def test_a_different_model_reproduces_none(reference, make_model, tokenizer):
    found = greedy_agreement(reference, make_model(seed=5), tokenizer, max_new_tokens=8)
    assert found.k == 0
    assert found.survival[-1][1] == 0
    assert all(r.candidate_text != r.reference_text for r in found.prompts)


def test_the_stop_token_ends_the_reference_and_must_be_reproduced(
    reference, make_perturbed, tokenizer
):
    ids = prompt_tokens(tokenizer, read_prompts()[0].prompt)
    free = greedy_tokens(reference, tokenizer, ids, 12).tolist()
    stop = next(t for i, t in enumerate(free) if i >= 2 and t not in free[:i])
    where = free.index(stop)
    before = reference.generation_config
    reference.generation_config = GenerationConfig(eos_token_id=[stop, 1], pad_token_id=1)
    try:
        assert greedy_tokens(reference, tokenizer, ids, 12).tolist() == free[: where + 1]
        never = make_perturbed(reference, 0.0)
        with torch.no_grad():
            never.lm_head.weight[stop] = 0  # a logit of 0 is never the largest
        row = greedy_agreement(reference, never, tokenizer, max_new_tokens=12).prompts[0]
    finally:
        reference.generation_config = before
    assert (row.length, row.agreed, row.diverged) == (where + 1, where, True)


def test_penalties_of_the_checkpoint_are_left_out_and_put_back(reference, tokenizer):
    ids = prompt_tokens(tokenizer, "aaaa")
    plain = greedy_tokens(reference, tokenizer, ids, 16)
    before = reference.generation_config
    settings = GenerationConfig(
        repetition_penalty=50.0, do_sample=True, temperature=9.0, eos_token_id=1, pad_token_id=1
    )
    reference.generation_config = settings
    try:
        assert torch.equal(greedy_tokens(reference, tokenizer, ids, 16), plain)
        assert reference.generation_config is settings
        penalised = reference.generate(ids[None], do_sample=False, max_new_tokens=16)[0, len(ids) :]
        assert not torch.equal(penalised, plain)  # else the settings above change nothing
    finally:
        reference.generation_config = before


def test_the_chat_template_applies_where_there_is_one(tokenizer):
    assert tokenizer.decode(prompt_tokens(tokenizer, "hello")) == "hello"
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    try:
        assert tokenizer.decode(prompt_tokens(tokenizer, "hello")) == "[user]hello[assistant]"
    finally:
        tokenizer.chat_template = None


def test_survival_counts_censored_texts_as_at_risk_up_to_their_length():
    # Six texts: diverged after 0, 4, 4 and 10 tokens; equal over 6 and 12.
    curve = survival([(0, True), (4, True), (4, True), (6, False), (10, True), (12, False)])
    assert [t for t, _ in curve] == [0, 4, 10]
    assert [s for _, s in curve] == pytest.approx([5 / 6, 5 / 6 * 3 / 5, 5 / 6 * 3 / 5 * 1 / 2])


def test_the_result_survives_json_and_carries_both_texts(read_back):
    found = json.loads(json.dumps(read_back.to_dict(), allow_nan=False))
    assert found["k"] == sum(not row["diverged"] for row in found["prompts"])
    assert all("reference_text" in row and "candidate_text" in row for row in found["prompts"])
    assert found["equal"]["low"] < found["equal"]["value"] < found["equal"]["high"]


def test_bad_requests_name_the_number(reference, tokenizer, prompts, tmp_path):
    with pytest.raises(BadRequest, match=f"at least {MINIMUM_PROMPTS}"):
        greedy_agreement(reference, reference, tokenizer, prompts[:11])
    with pytest.raises(BadRequest, match="'beam'"):
        greedy_agreement(reference, reference, tokenizer, prompts, method="beam")
    with pytest.raises(BadRequest, match="0 new tokens"):
        greedy_agreement(reference, reference, tokenizer, prompts, max_new_tokens=0)
    bad = tmp_path / "prompts.json"
    bad.write_text('[{"text": "no name"}]')
    with pytest.raises(BadRequest, match=r"prompts\.json"):
        read_prompts(bad)
