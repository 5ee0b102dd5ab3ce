"""Plots for the report, as SVG text to be put inside an HTML page.

Colours are CSS variables of the page with fallbacks, so that one SVG suits light and dark; text
stays text in the page's own font. Drawn on figures of their own: no pyplot, no global state.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

SMALLEST_KL = 1e-7
"""Left edge of the KL axis in nats; smaller values, and exact zeros, are drawn there."""

# Stand-ins while drawing -> what the page paints them with.
_INK, _LINE, _FIRST, _SECOND = "#010101", "#020202", "#030303", "#040404"
_PAINT = {
    _INK: "currentColor",
    _LINE: "var(--line, #d0d4dc)",
    _FIRST: "var(--accent, #2f6fde)",
    _SECOND: "var(--second, #8a93a3)",
}


def kl_distribution(curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Share of tokens whose KL is at most x, on a logarithmic x, one line a curve.

    curves: name -> `FidelitySummary.kl_curve`, points (fraction, KL in nats). At most two: the
    candidate and the noise floor.
    """
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    styles = [(_FIRST, "-"), (_SECOND, "--")]
    for (name, curve), (colour, line) in zip(curves.items(), styles, strict=False):
        fractions = [fraction for fraction, _ in curve]
        values = [max(kl, SMALLEST_KL) for _, kl in curve]
        axes.plot(values, fractions, color=colour, linestyle=line, linewidth=2, label=name)
    axes.set_xscale("log")
    axes.set_xlim(left=SMALLEST_KL)
    axes.set_ylim(0, 1.02)
    axes.xaxis.set_major_formatter(lambda value, _: _power_of_ten(value))
    axes.set_xlabel(f"KL divergence, nats (below {_power_of_ten(SMALLEST_KL)} drawn at the edge)")
    axes.set_ylabel("share of tokens")
    axes.legend(frameon=False, labelcolor=_INK, loc="upper left")
    return _svg(figure, "Distribution of the KL divergence over tokens", [axes])


def by_confidence(buckets: Sequence[Mapping[str, Any]]) -> str:
    """Top-1 agreement with its interval, and mean KL, by the reference's top probability.

    buckets: dicts of `fidelity.metrics.Bucket`, from unsure to sure.
    """
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [f"{bucket['low']:g} to {bucket['high']:g}" for bucket in buckets]
    places = range(len(buckets))
    top1 = [bucket["top1"] for bucket in buckets]
    values = [interval["value"] for interval in top1]
    left.bar(places, values, color=_FIRST, width=0.7)
    left.errorbar(
        places,
        values,
        yerr=[
            [max(i["value"] - i["low"], 0) for i in top1],
            [max(i["high"] - i["value"], 0) for i in top1],
        ],
        fmt="none",
        ecolor=_INK,
        elinewidth=1.2,
        capsize=3,
    )
    left.set_ylim(0, 1.02)
    left.set_ylabel("top-1 agreement")
    right.bar(places, [bucket["mean_kl"] for bucket in buckets], color=_FIRST, width=0.7)
    right.set_ylabel("mean KL divergence, nats")
    for axes in (left, right):
        axes.set_xticks(list(places), names, rotation=40, ha="right")
    figure.supxlabel("the reference's probability of its own choice", fontsize=9, color=_INK)
    return _svg(figure, "Agreement by the reference's confidence", [left, right])


def _power_of_ten(value: float) -> str:
    """0.001 and up as it is, smaller powers as 10⁻⁷."""
    exponent = round(math.log10(value))
    if exponent >= -3:
        return f"{value:g}"
    return "10⁻" + str(-exponent).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _svg(figure: Figure, label: str, all_axes: list[Axes]) -> str:
    """The figure as one <svg> element that scales with its container."""
    for axes in all_axes:
        axes.patch.set_alpha(0)
        axes.grid(True, axis="y", color=_LINE, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=_INK, labelsize=9, length=3, which="both")
        axes.xaxis.label.set_color(_INK)
        axes.yaxis.label.set_color(_INK)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(_LINE)
    figure.patch.set_alpha(0)
    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # matplotlib's own rule is for every element of the page; the page has its own for .plot.
    text = re.sub(r"<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"(font: [\d.]+px)[^;\"]*", r"\1 system-ui, sans-serif", text)
    head = f'<svg class="plot" role="img" aria-label="{escape(label)}"'
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = text.replace("<svg", head, 1)
    for stand_in, paint in _PAINT.items():
        text = text.replace(stand_in, paint)
    return text
