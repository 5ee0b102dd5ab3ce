from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import matplotlib

from weightpath.report.plots import by_confidence, kl_distribution


def both(data):
    summary = data["fidelity"]["summary"]
    curves = {"these": summary["kl_curve"], "floor": [(0.0, 0.0), (1.0, 0.0)]}
    return kl_distribution(curves), by_confidence(summary["by_confidence"])


def test_plots_are_svg_that_scales_with_text_and_page_colours(data):
    for svg in both(data):
        root = ElementTree.fromstring(svg)
        assert root.tag.endswith("svg")
        assert "viewBox" in root.attrib
        assert "width" not in root.attrib
        assert root.attrib["aria-label"]
        assert "var(--accent" in svg
        assert "currentColor" in svg
        assert not re.search(r"#0[1-4]0[1-4]0[1-4]", svg)
        assert "<style" not in svg
        assert list(root.iter("{http://www.w3.org/2000/svg}text"))


def test_plots_are_the_same_every_time(data):
    assert both(data) == both(data)


def test_the_two_plots_of_one_page_share_no_ids_that_differ(data):
    def definitions(svg):
        root = ElementTree.fromstring(svg)
        return {e.get("id"): ElementTree.tostring(e) for e in root.iter() if e.tag.endswith("Path")}

    first, second = (definitions(svg) for svg in both(data))
    assert all(first[i] == second[i] for i in first.keys() & second.keys())


def test_drawing_leaves_the_settings_of_matplotlib_as_they_were(data):
    before = dict(matplotlib.rcParams)
    both(data)
    assert dict(matplotlib.rcParams) == before


def test_every_bucket_is_named_and_the_height_follows_the_value(data):
    buckets = data["fidelity"]["summary"]["by_confidence"]
    svg = by_confidence(buckets)
    for bucket in buckets:
        assert f"{bucket['low']:g} to {bucket['high']:g}" in svg
    lower = [dict(b, top1={"value": 0.1, "low": 0.05, "high": 0.2}) for b in buckets]
    assert by_confidence(lower) != svg
