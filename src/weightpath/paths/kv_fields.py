"""Reading a config for its cache: the section that holds the decoder, and numbers by their names.

Families spell the same number in several ways (num_hidden_layers, n_layer, decoder_layers), so a
number is asked for by all of its names. What was read is remembered, so that a budget can say on
which fields it rests. A field that is missing, or holds what is no whole number, is an error that
names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weightpath.errors import BadCheckpoint

TEXT_SECTIONS = (
    "text_config", "language_config", "llm_config", "thinker_config", "llm", "decoder", "generator",
)  # fmt: skip
"""Sections that hold the model that generates, in the order they are looked for."""
LARGEST = 1 << 40
_WEIGHTLESS = ("quantization_config", "compression_config", "generation_config")


@dataclass(frozen=True)
class Fields:
    """One section of a config. `used` collects the names that were read and their values."""

    values: Mapping[str, Any]
    where: str
    used: dict[str, Any] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        """A field's value, None where it is missing or null."""
        value = self.values.get(name)
        if value is not None:
            self.used[name] = value
        return value

    def first(self, *names: str) -> int | None:
        """The first of `names` that is there, as a whole number above 0; None where none is."""
        for name in names:
            value = self.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= LARGEST:
                raise BadCheckpoint(
                    self.where, f"{name} is {value!r:.40}, wanted a whole number above 0",
                    "mend that field",
                )  # fmt: skip
            return value
        return None

    def need(self, name: str, *others: str) -> int:
        """As `first`, and an error that names the field where there is none."""
        found = self.first(name, *others)
        if found is None:
            raise self.missing(name, *others)
        return found

    def missing(self, name: str, *others: str) -> BadCheckpoint:
        """The error for a field that the cache cannot be counted without."""
        nor = f" (nor {', '.join(others)})" if others else ""
        return BadCheckpoint(
            self.where,
            f"has no {name}{nor}, without which its KV cache cannot be counted",
            f"add {name} to the config",
        )

    def listed(self, name: str) -> list[Any] | None:
        """A list field; an error where it is something else."""
        value = self.get(name)
        if value is None or isinstance(value, list):
            return value
        if isinstance(value, tuple):
            return list(value)
        raise BadCheckpoint(
            self.where, f"{name} is {value!r:.40}, wanted a list", "mend that field"
        )


def text_path(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys that lead from a config to the section of the decoder; () where it is the whole.

    A composite model nests it: text_config of a vision model, decoder of an encoder-decoder pair,
    thinker_config.text_config of an omni model.
    """
    for name in TEXT_SECTIONS:
        section = config.get(name)
        if isinstance(section, Mapping) and section:
            return (name, *text_path(section))
    return ()


def section_at(config: Mapping[str, Any], path: tuple[str, ...]) -> Mapping[str, Any]:
    """The section that `path` leads to."""
    for name in path:
        config = config[name]
    return config


def towers(config: Mapping[str, Any], path: tuple[str, ...]) -> tuple[str, ...]:
    """The parts beside the decoder that hold no KV cache: vision, audio and other encoders.

    A sentence each, with its model_type and layers where the config says them.
    """
    found = []
    sections = [config, *(section_at(config, path[:end]) for end in range(1, len(path)))]
    for depth, section in enumerate(sections):
        for name, value in section.items():
            part = name.endswith(("_config", "_tower")) or name == "encoder"
            inside = depth < len(path) and name == path[depth]
            if not part or inside or name in _WEIGHTLESS or not isinstance(value, Mapping):
                continue
            if name.startswith(("linear_attn", "rope", "ssm", "attn", "ffn")):
                continue
            fields = Fields(value, name)
            layers = fields.first("num_hidden_layers", "depth", "encoder_layers", "num_layers")
            kind = value.get("model_type") or "no model_type"
            many = f", {layers} layers" if layers else ""
            found.append(f"{name} ({kind}{many})")
    return tuple(found)
