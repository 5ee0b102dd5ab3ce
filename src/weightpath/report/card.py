"""README.md of a written checkpoint: what it is, how it was made, what it cost, how to load it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from shlex import quote
from typing import Any

from weightpath.report.data import ReportData, RunWith

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def model_card(data: ReportData) -> str:
    """Markdown with YAML front matter; parts whose numbers are absent from data are left out.

    The source is named in the front matter only where it is a hub id. Folders are cut to their
    last name, so that a card does not carry paths of the machine that made it.
    """
    written = data.get("written", {})
    folder = _folder(data)
    parts = [_front_matter(data), f"# {_plain(folder)}", _opening(data)]
    if rows := _written_rows(data):
        parts.append("## What is stored\n\n" + _table(["", ""], rows))
    if by_scheme := written.get("by_scheme"):
        rows = [[_code(name), str(count)] for name, count in by_scheme.items()]
        parts.append(_table(["scheme", "tensors"], rows))
    if command := data.get("command"):
        version = f" with weightpath {data.get('version', '')}".rstrip()
        parts.append(f"## How it was made\n\nMade{version} by\n\n{_block(command, 'sh')}")
    if fidelity := _fidelity(data):
        parts.append(fidelity)
    ways = ["## How to load it"]
    for way in data.get("run_with") or ways_to_run(data):
        ways.append(f"**{_plain(way.get('name', ''))}**")
        ways.append(_block(way.get("command", ""), way.get("language", "sh")))
        if note := way.get("note"):
            ways.append(_plain(note))
    parts.append("\n\n".join(ways))
    return "\n\n".join(parts) + "\n"


def ways_to_run(data: ReportData) -> list[RunWith]:
    """Runtimes that read compressed-tensors `pack-quantized`, each with the command to type."""
    folder = _folder(data)
    schemes = list(data.get("written", {}).get("by_scheme", {}))
    floats = ("bfloat16", "float16", "float32")
    other = [name for name in schemes if not name.startswith("w4") and name not in floats]
    vllm: RunWith = {"name": "vLLM", "command": f"vllm serve {quote(folder)}"}
    if other:
        vllm["note"] = (
            f"vLLM's CPU kernel takes 4-bit linears only, and this checkpoint also holds "
            f"{', '.join(other)}; for a CPU, quantize with --runtime vllm."
        )
    transformers: RunWith = {
        "name": "transformers",
        "language": "python",
        "command": "# pip install transformers compressed-tensors\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(folder)})\n"
        f"model = AutoModelForCausalLM.from_pretrained({json.dumps(folder)})",
    }
    if any(name.endswith("-asym") for name in schemes):
        transformers["note"] = (
            "With compressed-tensors 0.18 to 0.20 its default way of loading refuses zero points: "
            "pass quantization_config=CompressedTensorsConfig(dequantize=True)"
            + (", which an int8 head does not survive: make it with --head 16." if other else ".")
        )
    return [
        {"name": "weightpath", "command": f"weightpath run {quote(folder)} --prompt 'Hello'"},
        transformers,
        vllm,
    ]


def _folder(data: ReportData) -> str:
    return Path(data.get("written", {}).get("folder", "model")).name or "model"


def _front_matter(data: ReportData) -> str:
    """YAML; every string is written as JSON, which YAML reads as it stands."""
    scheme = data.get("scheme")
    fields: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    base = data.get("base_model", "")
    if _HUB_ID.fullmatch(base):
        fields |= {"base_model": base, "base_model_relation": "quantized"}
    if terms := data.get("license"):
        fields["license"] = terms
    fields["tags"] = [
        "weightpath",
        "compressed-tensors",
        "quantized",
        *([scheme] if scheme else []),
    ]
    lines = [f"{key}: {json.dumps(value)}" for key, value in fields.items()]
    return "\n".join(["---", *lines, "---"])


def _opening(data: ReportData) -> str:
    base = data.get("base_model") or data.get("model") or ""
    source = _code(base if _HUB_ID.fullmatch(base) else Path(base).name) if base else "a model"
    name = data.get("scheme")
    scheme = f" in the scheme {_code(name)}" if name else ""
    return f"Low-bit weights of {source}{scheme}, stored as compressed-tensors `pack-quantized`."


def _written_rows(data: ReportData) -> list[list[str]]:
    written = data.get("written", {})
    rows = []
    if "linear_bits_per_weight" in written:
        rows.append(["bits per weight of the linears", f"{written['linear_bits_per_weight']:.3f}"])
    if "file_bits_per_weight" in written:
        rows.append(["bits per weight of the whole file", f"{written['file_bits_per_weight']:.3f}"])
    if "bytes" in written:
        rows.append(["bytes", f"{written['bytes']:,}"])
    if "tensors" in written:
        rows.append(["tensors", f"{written['tensors']:,}"])
    return rows


def _fidelity(data: ReportData) -> str:
    fidelity = data.get("fidelity", {})
    summary, rows = fidelity.get("summary"), []
    if summary:
        for key, label, places in (
            ("mean_kl", "mean KL divergence, nats", 4),
            ("median_kl", "median KL divergence, nats", 4),
            ("p999_kl", "99.9th percentile KL divergence, nats", 3),
            ("top1", "top-1 agreement", 4),
            ("perplexity_reference", "perplexity of the original", 3),
            ("perplexity_candidate", "perplexity of these weights", 3),
        ):
            value, low, high = (f"{summary[key][k]:.{places}f}" for k in ("value", "low", "high"))
            rows.append([label, value, f"{low} to {high}"])
    if greedy := fidelity.get("greedy"):
        low, high = (f"{greedy['equal'][key]:.3f}" for key in ("low", "high"))
        rows.append(["greedy texts equal", f"{greedy['k']} of {greedy['n']}", f"{low} to {high}"])
    if not rows:
        return ""
    text = "## Fidelity\n\nAgainst the original weights"
    if ran := fidelity.get("ran"):
        text += f", run by {_plain(ran)}"
    if summary:
        text += (
            f", {summary['tokens']:,} tokens in {summary['windows']} windows"
            f" (intervals by {summary['clustered_by']})"
        )
    if measured_on := fidelity.get("text"):
        text += f". Text: {_plain(measured_on)}"
    return text + ".\n\n" + _table(["measure", "value", "95% interval"], rows)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in lines
    )


def _plain(text: str) -> str:
    """One line of text in which Markdown and HTML see nothing of their own."""
    return re.sub(r"([\\`*\[\]<>#])", r"\\\1", " ".join(text.split()))


def _code(text: str) -> str:
    text = " ".join(text.split())
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if "`" in text else ""
    return f"{ticks}{pad}{text}{pad}{ticks}"


def _block(text: str, language: str) -> str:
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text.strip()}\n{fence}"
