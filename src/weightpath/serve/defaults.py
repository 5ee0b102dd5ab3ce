"""Sampling of a request that names none: OpenAI's, under what the checkpoint's makers advise."""

from __future__ import annotations

from transformers import PreTrainedModel

from weightpath.engine.sampling import Sampling

SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def default_sampling(model: PreTrainedModel) -> Sampling:
    """Temperature 1 and no limits, where generation_config.json says nothing else. do_sample false
    in it is temperature 0. BadRequest for a value in it that cannot be."""
    config = getattr(model, "generation_config", None)
    said = {} if config is None else config.to_diff_dict()
    advised = {name: said[name] for name in SETTINGS if said.get(name) is not None}
    advised = {"temperature": 1.0, **advised}
    if said.get("do_sample") is False:
        advised["temperature"] = 0.0
    return Sampling(**advised)
