from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from weightpath.errors import BadRequest, BadTensor
from weightpath.fidelity import logits as logits_room
from weightpath.fidelity.logits import compare, noise_floor
from weightpath.fidelity.text import Document, windows


@pytest.fixture(scope="module")
def texts(tokenizer):
    documents = [Document(str(i), f"{i} the quick brown fox, line {i}. " * 12) for i in range(10)]
    return windows(tokenizer, documents, length=80)


def plain_scores(reference, candidate, tokens):
    """The formulas of the room written out, one position at a time, in numpy float64."""
    with torch.inference_mode():
        a = reference(input_ids=tokens[None]).logits[0].double().numpy()
        b = candidate(input_ids=tokens[None]).logits[0].double().numpy()
    rows = []
    for i in range(len(tokens) - 1):
        p, q = np.exp(a[i]) / np.exp(a[i]).sum(), np.exp(b[i]) / np.exp(b[i]).sum()
        following = int(tokens[i + 1])
        rows.append(
            (
                sum(p[v] * np.log(p[v] / q[v]) for v in range(len(p))),
                p.argmax() == q.argmax(),
                -np.log(p[following]),
                -np.log(q[following]),
                p.max(),
            )
        )
    return np.array(rows, dtype=float)


def test_scores_equal_the_formulas_written_out(reference, candidate, texts):
    scores = compare(reference, candidate, texts)
    wanted = np.concatenate([plain_scores(reference, candidate, w.tokens) for w in texts])
    found = np.stack(
        [scores.kl, scores.same_top, scores.nll_reference, scores.nll_candidate,
         scores.top_probability], axis=1,
    )  # fmt: skip
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)
    assert scores.kl.mean() > 1e-4
    assert 0 < scores.same_top.mean() < 1


def test_kl_is_not_symmetric_and_p_is_the_reference(reference, candidate, texts):
    there, back = compare(reference, candidate, texts), compare(candidate, reference, texts)
    np.testing.assert_array_equal(there.nll_reference, back.nll_candidate)
    assert not np.allclose(there.kl, back.kl, rtol=1e-3)


def test_a_model_against_itself_has_exactly_no_kl(reference, texts):
    scores = compare(reference, copy.deepcopy(reference), texts)
    assert (scores.kl == 0).all()
    assert scores.same_top.all()
    np.testing.assert_array_equal(scores.nll_reference, scores.nll_candidate)


def test_kl_of_nearly_equal_models_does_not_fall_below_zero(reference, make_perturbed, texts):
    scores = compare(reference, make_perturbed(reference, 1e-6), texts)
    assert scores.kl.min() > -1e-12
    assert scores.kl.max() > 0


def test_every_token_knows_its_window_and_document(reference, texts):
    scores = compare(reference, reference, texts)
    assert np.bincount(scores.window).tolist() == [len(w.tokens) - 1 for w in texts]
    assert all(texts[w].document == d for w, d in zip(scores.window, scores.document, strict=True))


def test_the_size_of_a_chunk_does_not_change_the_scores(reference, candidate, texts, monkeypatch):
    whole = compare(reference, candidate, texts)
    monkeypatch.setattr(logits_room, "CHUNK_ELEMENTS", 128 * 7)
    np.testing.assert_allclose(compare(reference, candidate, texts).kl, whole.kl, rtol=1e-12)


def test_both_models_read_each_window_in_the_same_batch_shape(reference, candidate, texts):
    seen = []
    hooks = [
        model.model.embed_tokens.register_forward_pre_hook(
            lambda _, args, which=which: seen.append((which, tuple(args[0].shape)))
        )
        for which, model in (("reference", reference), ("candidate", candidate))
    ]
    try:
        compare(reference, candidate, texts)
    finally:
        for hook in hooks:
            hook.remove()
    assert seen[0::2] == [("reference", (1, len(w.tokens))) for w in texts]
    assert seen[1::2] == [("candidate", (1, len(w.tokens))) for w in texts]


def test_progress_counts_windows(reference, texts):
    calls = []
    compare(reference, reference, texts, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(i + 1, len(texts)) for i in range(len(texts))]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_name_the_window_and_position(reference, texts, bad):
    broken = copy.deepcopy(reference)
    calls = []

    def spoil(_, __, output):
        calls.append(1)
        if len(calls) == 3:
            output = output.clone()
            output[0, 17, 5] = bad
        return output

    broken.lm_head.register_forward_hook(spoil)
    with pytest.raises(BadTensor, match=r"candidate logits: window 2, position 17, token 5"):
        compare(reference, broken, texts)


def test_models_that_do_not_belong_together_are_refused(reference, make_model, texts):
    with pytest.raises(BadRequest, match="two forms of one model"):
        compare(reference, make_model(vocabulary=130), texts)
    with pytest.raises(BadRequest, match="candidate model has 50 tokens"):
        compare(reference, make_model(vocabulary=50), texts)
    with pytest.raises(BadRequest, match="training mode"):
        compare(reference, make_model().train(), texts)
    with pytest.raises(BadRequest, match="0 windows"):
        compare(reference, reference, [])


def test_noise_floor_runs_at_the_other_thread_count_and_restores_it(reference, texts):
    before = torch.get_num_threads()
    other = before + 1
    seen = []
    hook = reference.lm_head.register_forward_pre_hook(
        lambda *_: seen.append(torch.get_num_threads())
    )
    try:
        scores = noise_floor(reference, texts, threads=other)
    finally:
        hook.remove()
    assert seen == [before, other] * len(texts)
    assert torch.get_num_threads() == before
    assert scores.comparison.endswith(f"against itself on {other} threads")
    assert np.abs(scores.kl).max() < 1e-8
    assert scores.same_top.all()


def test_noise_floor_restores_the_thread_count_when_the_model_fails(reference, texts):
    before = torch.get_num_threads()
    broken = copy.deepcopy(reference)

    def fail(*_):
        if torch.get_num_threads() != before:
            raise RuntimeError("stop here")

    broken.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="stop here"):
        noise_floor(broken, texts, threads=before + 1)
    assert torch.get_num_threads() == before


def test_noise_floor_refuses_a_run_that_varies_nothing_or_two_things(reference, texts):
    with pytest.raises(BadRequest, match="another count"):
        noise_floor(reference, texts, threads=torch.get_num_threads())
    with pytest.raises(BadRequest, match="1 copies against 1"):
        noise_floor(reference, texts, copies=1)
    with pytest.raises(BadRequest, match="not both"):
        noise_floor(reference, texts, threads=torch.get_num_threads() + 1, copies=2)


def test_noise_floor_can_vary_the_batch_instead_of_the_threads(reference, texts):
    seen = []
    hook = reference.model.embed_tokens.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].shape[0])
    )
    try:
        scores = noise_floor(reference, texts, copies=3)
    finally:
        hook.remove()
    assert seen == [1, 3] * len(texts)
    assert "batches of 3" in scores.comparison
    assert np.abs(scores.kl).max() < 1e-8
    assert scores.same_top.all()
