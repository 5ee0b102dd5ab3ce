"""What was lost, in a few numbers, each with how sure it is.

From token scores (logits.py): mean, median and 99.9th percentile KL divergence, top-1 agreement,
perplexity of both models and their ratio. KL and top-1 come first: perplexity can fall while KL
rises.

    perplexity = exp(mean nll)          ratio = exp(mean(nll_candidate - nll_reference)), paired

Intervals are 95% percentile bootstraps that draw whole clusters with replacement (documents, or
windows where documents are unknown or too few), since tokens of one document are not independent
and errors that assume so come out too narrow. A resample is a vector of cluster weights
W [R, C]; sums over clusters give the means, and weighted counts over sorted tokens the quantiles.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from weightpath.errors import BadRequest
from weightpath.fidelity.logits import TokenScores
from weightpath.fidelity.text import NO_DOCUMENT

METRIC_VERSION = 1
"""Goes up when a number here changes its meaning; figures compare only within one version."""

RESAMPLES = 1000
MINIMUM_DOCUMENTS = 8
"""Fewer documents than this are too few to resample; windows are drawn instead, and it is said."""

CONFIDENCE_EDGES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
"""Edges of the buckets of the reference's top probability."""

_CURVE = (*(i / 100 for i in range(100)), 0.993, 0.995, 0.997, 0.999, 0.9995, 0.9999, 1.0)


@dataclass(frozen=True)
class Interval:
    """A value and the 95% interval around it, low <= high."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Bucket:
    """Tokens whose reference top probability is in [low, high): how they fared.

    `top1` has a Wilson interval, which takes the tokens as independent.
    """

    low: float
    high: float
    tokens: int
    mean_kl: float  # nats
    top1: Interval


@dataclass(frozen=True)
class FidelitySummary:
    """Fidelity of one comparison. KL in nats, top-1 as a fraction, perplexity per token.

    `clustered_by` is "documents" or "windows": what the bootstrap drew. `kl_curve` holds
    (fraction of tokens, KL that they do not exceed), for a plot of the distribution.
    """

    comparison: str
    tokens: int
    windows: int
    clustered_by: str
    clusters: int
    resamples: int
    mean_kl: Interval
    median_kl: Interval
    p999_kl: Interval
    max_kl: float
    top1: Interval
    perplexity_reference: Interval
    perplexity_candidate: Interval
    perplexity_ratio: Interval
    by_confidence: tuple[Bucket, ...]
    kl_curve: tuple[tuple[float, float], ...]
    metric_version: int = METRIC_VERSION

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, tuples and numbers, ready for JSON."""
        return asdict(self)


def summarize(scores: TokenScores, resamples: int = RESAMPLES, seed: int = 0) -> FidelitySummary:
    """Summary with bootstrapped intervals; the same scores and seed give the same numbers.

    BadRequest where there are fewer than two clusters, which leave nothing to resample.
    """
    clustered_by, cluster = _clusters(scores)
    count = int(cluster.max()) + 1
    if count < 2:
        raise BadRequest(
            f"fidelity: {count} window cannot give an interval; measure on 2 windows or more"
        )
    # How often each cluster was drawn: [R, C], every row sums to C.
    weights = np.random.default_rng(seed).multinomial(count, [1 / count] * count, size=resamples)
    totals = weights @ np.bincount(cluster, minlength=count)

    def mean(values: np.ndarray) -> Interval:
        sums = np.bincount(cluster, weights=values, minlength=count)
        return _interval(float(values.mean()), weights @ sums / totals)

    median, p999 = _quantile_intervals(scores.kl, cluster, weights, (0.5, 0.999))
    return FidelitySummary(
        comparison=scores.comparison,
        tokens=len(scores.kl),
        windows=int(scores.window.max()) + 1,
        clustered_by=clustered_by,
        clusters=count,
        resamples=resamples,
        mean_kl=mean(scores.kl),
        median_kl=median,
        p999_kl=p999,
        max_kl=float(scores.kl.max()),
        top1=mean(scores.same_top.astype(float)),
        perplexity_reference=_exp(mean(scores.nll_reference)),
        perplexity_candidate=_exp(mean(scores.nll_candidate)),
        perplexity_ratio=_exp(mean(scores.nll_candidate - scores.nll_reference)),
        by_confidence=_buckets(scores),
        kl_curve=tuple((q, quantile(scores.kl, q)) for q in _CURVE),
    )


def quantile(values: np.ndarray, fraction: float) -> float:
    """Smallest value that at least `fraction` of the values do not exceed (inverted CDF)."""
    return float(np.quantile(values, fraction, method="inverted_cdf"))


def wilson(k: int, n: int, z: float = 1.96) -> Interval:
    """Wilson score interval of k successes in n independent trials.

        (k + z²/2) / (n + z²)  ±  z / (n + z²) * sqrt(k (n - k) / n + z²/4)

    Unlike k/n ± z·sqrt(..), it stays within 0..1 and does not collapse at k = 0 or n.
    """
    if n < 1 or not 0 <= k <= n:
        raise BadRequest(f"{k} of {n} is not a proportion; give 0 <= k <= n with n at least 1")
    centre = (k + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(k * (n - k) / n + z * z / 4)
    low = 0.0 if k == 0 else centre - half
    high = 1.0 if k == n else centre + half
    return Interval(k / n, low, high)


def _clusters(scores: TokenScores) -> tuple[str, np.ndarray]:
    """What the bootstrap draws, and the cluster 0..C-1 of every token."""
    documents, index = np.unique(scores.document, return_inverse=True)
    if len(documents) >= MINIMUM_DOCUMENTS and NO_DOCUMENT not in documents:
        return "documents", index
    return "windows", scores.window


def _interval(value: float, resampled: np.ndarray) -> Interval:
    low, high = np.quantile(resampled, (0.025, 0.975))
    return Interval(value, float(low), float(high))


def _exp(interval: Interval) -> Interval:
    """Each end exponentiated; infinite where a broken model's loss exceeds what a float holds."""
    with np.errstate(over="ignore"):
        value, low, high = np.exp([interval.value, interval.low, interval.high]).tolist()
    return Interval(value, low, high)


def _quantile_intervals(
    values: np.ndarray, cluster: np.ndarray, weights: np.ndarray, fractions: tuple[float, ...]
) -> list[Interval]:
    """Quantiles of every resample, as if its clusters' tokens were joined and sorted."""
    order = np.argsort(values, kind="stable")
    ordered, owner = values[order], cluster[order]
    resampled = np.empty((len(weights), len(fractions)))
    for r, weight in enumerate(weights):
        below = np.cumsum(weight[owner])
        wanted = np.ceil(np.array(fractions) * below[-1])
        resampled[r] = ordered[np.searchsorted(below, wanted)]
    return [
        _interval(quantile(values, fraction), resampled[:, i])
        for i, fraction in enumerate(fractions)
    ]


def _buckets(scores: TokenScores) -> tuple[Bucket, ...]:
    """Buckets that hold at least one token, from unsure to sure."""
    found = []
    place = np.digitize(scores.top_probability, CONFIDENCE_EDGES[1:-1])
    for i, (low, high) in enumerate(pairwise(CONFIDENCE_EDGES)):
        inside = place == i
        if tokens := int(inside.sum()):
            same = int(scores.same_top[inside].sum())
            mean_kl = float(scores.kl[inside].mean())
            found.append(Bucket(low, high, tokens, mean_kl, wilson(same, tokens)))
    return tuple(found)
