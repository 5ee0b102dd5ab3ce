from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightpath.errors import BadRequest
from weightpath.fidelity.logits import TokenScores
from weightpath.fidelity.metrics import Interval, summarize, wilson


def scores_of(kl, document=None, window=None, same_top=None, nll=None, nll_candidate=None):
    kl = np.asarray(kl, dtype=float)
    t = len(kl)
    nll = np.full(t, 2.0) if nll is None else np.asarray(nll)
    window = np.arange(t) % 10 if window is None else np.asarray(window)
    return TokenScores(
        comparison="test",
        kl=kl,
        same_top=np.ones(t, bool) if same_top is None else np.asarray(same_top),
        nll_reference=nll,
        nll_candidate=nll if nll_candidate is None else np.asarray(nll_candidate),
        top_probability=np.linspace(0, 1, t),
        window=window,
        document=window if document is None else np.asarray(document),
    )


def test_values_are_those_of_all_tokens():
    rng = np.random.default_rng(3)
    kl, nll = rng.exponential(0.1, 4000), rng.exponential(2, 4000)
    same = rng.random(4000) < 0.9
    found = summarize(scores_of(kl, same_top=same, nll=nll, nll_candidate=nll + 0.1))
    assert found.mean_kl.value == pytest.approx(kl.mean())
    assert found.median_kl.value == np.sort(kl)[1999]
    assert found.p999_kl.value == np.sort(kl)[3995]
    assert found.max_kl == kl.max()
    assert found.top1.value == same.mean()
    assert found.perplexity_reference.value == pytest.approx(math.exp(nll.mean()))
    assert found.perplexity_candidate.value == pytest.approx(math.exp(nll.mean() + 0.1))
    assert found.perplexity_ratio.value == pytest.approx(math.exp(0.1))
    assert found.tokens == 4000
    assert found.clusters == 10


def test_the_paired_ratio_is_far_surer_than_either_perplexity():
    rng = np.random.default_rng(4)
    nll = rng.exponential(2, 4000)
    found = summarize(scores_of(np.zeros(4000), nll=nll, nll_candidate=nll + 0.1))
    ratio, reference = found.perplexity_ratio, found.perplexity_reference
    assert ratio.high - ratio.low < 1e-9
    assert reference.high - reference.low > 0.1


def test_intervals_equal_a_bootstrap_that_joins_the_drawn_clusters():
    rng = np.random.default_rng(5)
    cluster = rng.integers(0, 12, 3000)
    kl = rng.exponential(0.1, 3000) * (1 + cluster)
    found = summarize(scores_of(kl, window=cluster), resamples=300, seed=7)
    weights = np.random.default_rng(7).multinomial(12, [1 / 12] * 12, size=300)
    means, medians, tails = [], [], []
    for weight in weights:
        joined = np.concatenate([np.tile(kl[cluster == c], weight[c]) for c in range(12)])
        means.append(joined.mean())
        medians.append(np.quantile(joined, 0.5, method="inverted_cdf"))
        tails.append(np.quantile(joined, 0.999, method="inverted_cdf"))
    for interval, plain in (
        (found.mean_kl, means), (found.median_kl, medians), (found.p999_kl, tails),
    ):  # fmt: skip
        np.testing.assert_allclose(
            (interval.low, interval.high), np.quantile(plain, (0.025, 0.975)), rtol=1e-9
        )


def coverage(by_cluster: bool, texts: int) -> float:
    """Share of simulated texts, correlated within documents, whose interval holds the truth."""
    rng = np.random.default_rng(6)
    hits = 0
    for _ in range(texts):
        document = np.repeat(np.arange(30), 40)
        kl = 1 + np.repeat(rng.normal(0, 0.3, 30), 40) + rng.normal(0, 0.3, 1200)
        drawn = document if by_cluster else np.arange(1200)
        found = summarize(scores_of(kl, window=drawn), resamples=200).mean_kl
        hits += found.low <= 1 <= found.high
    return hits / texts


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    assert 0.88 <= coverage(by_cluster=True, texts=150) <= 0.99


def test_sabotage_taking_tokens_as_independent_covers_far_too_rarely():
    assert coverage(by_cluster=False, texts=40) < 0.6


def test_windows_are_drawn_where_documents_are_unknown_or_too_few():
    window = np.repeat(np.arange(20), 10)
    kl = np.ones(200)
    assert summarize(scores_of(kl, window=window, document=window // 2)).clustered_by == "documents"
    few = summarize(scores_of(kl, window=window, document=window // 10))
    assert (few.clustered_by, few.clusters) == ("windows", 20)
    assert (
        summarize(scores_of(kl, window=window, document=window * 0 - 1)).clustered_by == "windows"
    )


def test_document_indices_may_have_holes():
    window = np.repeat(np.arange(10), 10)
    found = summarize(scores_of(np.ones(100), window=window, document=window * 7))
    assert found.clusters == 10
    assert found.mean_kl == Interval(1.0, 1.0, 1.0)


def test_one_window_is_refused():
    with pytest.raises(BadRequest, match="2 windows or more"):
        summarize(scores_of([0.1, 0.2], window=[0, 0]))


def test_the_same_scores_give_the_same_numbers_and_survive_json():
    scores = scores_of(np.random.default_rng(8).exponential(0.1, 500))
    first, second = summarize(scores), summarize(scores)
    assert first == second
    back = json.loads(json.dumps(first.to_dict(), allow_nan=False))
    assert back["mean_kl"]["value"] == first.mean_kl.value
    assert back["metric_version"] == 1


def test_buckets_hold_every_token_once_and_their_own_means():
    rng = np.random.default_rng(9)
    scores = scores_of(rng.exponential(0.1, 1000), same_top=rng.random(1000) < 0.5)
    buckets = summarize(scores).by_confidence
    assert sum(b.tokens for b in buckets) == 1000
    middle = next(b for b in buckets if b.low == 0.5)
    inside = (scores.top_probability >= 0.5) & (scores.top_probability < 0.75)
    assert middle.mean_kl == pytest.approx(scores.kl[inside].mean())
    assert middle.top1.value == scores.same_top[inside].mean()
    assert sum(b.tokens * b.mean_kl for b in buckets) == pytest.approx(scores.kl.sum())


def test_the_curve_rises_to_the_largest_kl():
    curve = summarize(scores_of(np.random.default_rng(1).exponential(0.1, 1000))).kl_curve
    assert list(curve) == sorted(curve)
    assert curve[-1][0] == 1.0


@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    [
        (2, 12, 0.047, 0.448),
        (1, 12, 0.015, 0.354),
        (0, 10, 0.000, 0.278),
        (10, 10, 0.722, 1.000),
        (50, 100, 0.404, 0.596),
    ],
)
def test_wilson_gives_the_known_intervals(k, n, low, high):
    found = wilson(k, n)
    assert found.value == k / n
    assert (round(found.low, 3), round(found.high, 3)) == (low, high)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_its_value_within_zero_and_one(counts):
    k, n = counts
    found = wilson(k, n)
    assert 0 <= found.low <= found.value <= found.high <= 1
    assert found.low < found.high


def test_wilson_refuses_what_is_not_a_proportion():
    for k, n in ((1, 0), (-1, 5), (6, 5)):
        with pytest.raises(BadRequest, match=f"{k} of {n}"):
            wilson(k, n)
