"""Sampling where none is asked for: what the checkpoint's makers advise in generation_config.json.

`serve` and `run` read it the same way and differ only in the temperature where the file says
nothing of sampling: 1 is OpenAI's, 0 (greedy) is the command line's.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from weightpath.engine.sampling import Sampling

SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def advised(model: PreTrainedModel) -> dict[str, Any]:
    """The sampling settings that the file names. do_sample false in it is temperature 0; true is
    temperature 1 where it gives none, as in transformers."""
    config = getattr(model, "generation_config", None)
    said = {} if config is None else config.to_diff_dict()
    found = {name: said[name] for name in SETTINGS if said.get(name) is not None}
    if said.get("do_sample") is False:
        found["temperature"] = 0.0
    elif said.get("do_sample"):
        found = {"temperature": 1.0, **found}
    return found


def default_sampling(model: PreTrainedModel, unsaid_temperature: float = 1.0) -> Sampling:
    """`advised`, and no limits where it says nothing. BadRequest for a value that cannot be."""
    return Sampling(**{"temperature": unsaid_temperature, **advised(model)})
