from __future__ import annotations

import pytest
import yaml

from weightpath.report.card import model_card, ways_to_run


def front_matter(card: str) -> dict:
    _, head, _ = card.split("---\n", 2)
    return yaml.safe_load(head)


def test_the_front_matter_names_the_source_the_terms_and_the_tags(data):
    found = front_matter(model_card(data))
    assert found["base_model"] == "someone/some-model"
    assert found["base_model_relation"] == "quantized"
    assert found["license"] == "apache-2.0"
    assert {"quantized", "compressed-tensors", "w4g64"} <= set(found["tags"])


def test_a_source_that_is_a_folder_is_named_without_its_path(data):
    data["base_model"] = ""
    data["model"] = "/home/someone/models/private-model"
    card = model_card(data)
    assert "base_model" not in front_matter(card)
    assert "`private-model`" in card
    assert "/home/someone" not in card
    assert "somewhere/deep" not in card


def test_no_licence_is_claimed_where_the_source_told_none(data):
    del data["license"]
    assert "license" not in front_matter(model_card(data))


@pytest.mark.parametrize("license", ['odd: "terms" # yes', "no", "- a\nb: c"])
def test_front_matter_strings_cannot_break_the_yaml(data, license):
    data["license"] = license
    assert front_matter(model_card(data))["license"] == license


def test_the_card_tells_bits_bytes_command_and_fidelity(data):
    card = model_card(data)
    for line in (
        "| bits per weight of the linears | 4.250 |",
        "| bits per weight of the whole file | 5.123 |",
        "| bytes | 98,765,432 |",
        "| `w4g64` | 210 |",
        "weightpath build demo",
        "weightpath 0.1.0",
        "| greedy texts equal | 1 of 2 |",
    ):
        assert line in card
    mean = data["fidelity"]["summary"]["mean_kl"]
    row = f"| {mean['value']:.4f} | {mean['low']:.4f} to {mean['high']:.4f} |"
    assert f"| mean KL divergence, nats {row}" in card


def test_parts_without_numbers_are_left_out():
    card = model_card({"written": {"folder": "out"}})
    assert card.startswith("---\n")
    assert "## How to load it" in card
    for absent in ("## Fidelity", "## What is stored", "## How it was made"):
        assert absent not in card
    assert "## How to load it" in model_card({})


def test_the_ways_to_load_are_vllm_transformers_and_weightpath(data):
    card = model_card(data)
    for command in (
        "vllm serve demo-w4g64",
        'AutoModelForCausalLM.from_pretrained("demo-w4g64")',
        "weightpath run demo-w4g64",
    ):
        assert command in card
    data["run_with"] = [{"name": "only-this", "command": "run it"}]
    assert "only-this" in model_card(data)
    assert "vllm" not in model_card(data)


def test_the_limit_of_vllm_on_a_cpu_is_told_only_where_it_bites(data):
    assert "int8" in ways_to_run(data)[-1].get("note", "")
    data["written"]["by_scheme"] = {"w4g64": 211}
    assert "note" not in ways_to_run(data)[-1]


def test_a_folder_with_spaces_is_quoted_for_the_shell():
    assert (
        ways_to_run({"written": {"folder": "a b"}})[0]
        .get("command", "")
        .startswith("weightpath run 'a b' ")
    )


def test_text_that_looks_like_markup_stays_text(data):
    data["command"] = "echo '```'\n# heading"
    data["fidelity"]["text"] = "a | b <img src=x> *c*"
    card = model_card(data)
    assert "````sh\necho '```'" in card
    assert r"\<img src=x\>" in card
