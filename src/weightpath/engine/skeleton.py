"""A model without its weights: modules on the meta device, then filled tensor by tensor.

`build` makes the transformers model that a config.json describes, with no memory behind it.
`fill` gives parameters and saved buffers their tensors by checkpoint name. `finish` computes what
no checkpoint holds (rotary tables and other unsaved buffers) through transformers' own
initialiser, and refuses a model in which anything is still without a value.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from weightpath.errors import BadCheckpoint, BadTensor

MOST_LAYERS = 1000
"""Far above the deepest model there is (a few hundred)."""
_building = threading.Lock()
"""transformers sets torch's default dtype, which is the whole process's, while it builds a model."""
_LAYERS = re.compile(r"layers?$|depth$")


def build(
    config: Mapping[str, Any], dtype: torch.dtype, where: str = "config.json"
) -> PreTrainedModel:
    """The model on the meta device. BadCheckpoint if transformers cannot make one of the config."""
    plain = special_floats(config)
    settings = {key: value for key, value in plain.items() if key != "quantization_config"}
    kind = settings.pop("model_type", None)
    if not kind:
        raise BadCheckpoint(
            where, "has no model_type", "use a checkpoint with a transformers config.json"
        )
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise BadCheckpoint(where, f"model_type '{kind}' is unknown to transformers {transformers.__version__}",
                            "upgrade transformers, or convert the model to a known architecture")  # fmt: skip
    named = settings.get("architectures")
    if not isinstance(named, list) or not all(isinstance(entry, str) for entry in named):
        settings.pop("architectures", None)  # some releases of transformers refuse what is no list
        named = None
    name = named[0] if named else None
    _bounded(settings, where)
    try:
        parsed = AutoConfig.for_model(kind, **settings)
        with _building, torch.device("meta"), _NoInitialValues():
            found = getattr(transformers, name, None) if name else None
            if isinstance(found, type) and issubclass(found, PreTrainedModel):
                model = found._from_config(parsed, dtype=dtype)
            else:
                model = AutoModelForCausalLM.from_config(parsed, dtype=dtype)
    except Exception as error:  # what a config of wrong values raises is not one family
        said = " ".join(str(error).split())[:200]
        raise BadCheckpoint(where, f"config.json makes no {name or kind} model ({type(error).__name__}: {said})",
                            "mend its values, or upgrade transformers if the model is newer") from error  # fmt: skip
    return model.eval()


def special_floats(value: Any) -> Any:
    """A config's values with infinities and NaN as floats: transformers 5 writes them to
    config.json as {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        named = value.get("__float__")
        if len(value) == 1 and named in ("Infinity", "-Infinity", "NaN"):
            return float(named.replace("Infinity", "inf"))
        return {key: special_floats(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [special_floats(item) for item in value]
    return value


class _NoInitialValues(TorchFunctionMode):
    """Leaves torch's initialisers out: tensors of the meta device have no values to set, and asking
    for them is a fifth of building a model of 30 layers."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", "") == nn.init.__name__:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def _bounded(config: Mapping[str, Any], where: str) -> None:
    """BadCheckpoint for more layers than any model has: building them would take the machine."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            _bounded(value, where)
        elif isinstance(value, int) and value > MOST_LAYERS and _LAYERS.search(str(key)):
            raise BadCheckpoint(where, f"{key} is {value}, at most {MOST_LAYERS} are built",
                                "the config is damaged: fetch config.json again")  # fmt: skip


def renamed(model: PreTrainedModel) -> Callable[[str], str]:
    """A checkpoint's tensor name as the model spells it: transformers renames some when it loads.

    Renamings only; experts that it fuses keep their names. From transformers' own table
    (conversion_mapping, 5.0 and newer).
    """
    mapping = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [step for step in mapping if isinstance(step, WeightRenaming)]
    return lambda name: rename_source_key(name, renamings, [])[0]


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Name -> linear layer, in the model's order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def head_name(model: PreTrainedModel) -> str | None:
    """Name of the output head's module, or None where the model has none."""
    head = model.get_output_embeddings()
    return (
        next((name for name, module in model.named_modules() if module is head), None)
        if head is not None
        else None
    )


def embedding_name(model: PreTrainedModel) -> str:
    """Name of the input embedding's module."""
    table = model.get_input_embeddings()
    return next(name for name, module in model.named_modules() if module is table)


def fill(model: nn.Module, tensors: Iterable[tuple[str, Tensor]], where: str) -> tuple[str, ...]:
    """Give parameters and buffers their tensors; names that the model has no use for are returned.

    A name or shape that does not fit is an error, but for rotary tables and what the model's class
    says that checkpoints hold beside it (extra prediction layers).
    """
    left_out = []
    for name, tensor in tensors:
        if recomputed(name) or unused(model, name):
            left_out.append(name)
            continue
        module, leaf = _place(model, name, tensor.shape, where)
        if leaf in module._parameters:
            parameter = nn.Parameter(tensor, requires_grad=False)
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
            module._parameters[leaf] = parameter
        else:
            module._buffers[leaf] = tensor
    return tuple(left_out)


def empty_bias(linears: Mapping[str, nn.Linear], name: str, read: Callable[[str], Tensor]) -> bool:
    """Whether a tensor is a bias of zeros for a linear that has none: AutoGPTQ writes one for every
    linear. It adds nothing and is left out; one that is not zero is an error where it is placed."""
    module, _, leaf = name.rpartition(".")
    if leaf != "bias" or module not in linears or linears[module].bias is not None:
        return False
    return not bool(read(name).any())


def unused(model: nn.Module, name: str) -> bool:
    """Whether the model's class lists a tensor as one that checkpoints hold and it does not load."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def recomputed(name: str) -> bool:
    """Whether a tensor is a rotary table, which checkpoints before 2023 stored in every layer and
    models compute from their config. It is left out, and said to be."""
    return name.endswith("rotary_emb.inv_freq")


def check(model: nn.Module, shapes: Mapping[str, Sequence[int]], where: str) -> None:
    """Every tensor has a place of its shape, and every parameter and saved buffer a tensor.

    shapes: tensor name -> shape. `model` is as built, so that what it ties is asked for once.
    """
    for name, shape in shapes.items():
        if not recomputed(name) and not unused(model, name):
            _place(model, name, shape, where)
    saved = set(model.state_dict())
    wanted = [*dict(model.named_parameters()), *dict(model.named_buffers())]
    _none_missing([name for name in wanted if name in saved and name not in shapes], where)


def finish(model: PreTrainedModel, where: str) -> PreTrainedModel:
    """Tie, compute the unsaved buffers, and refuse what is still without a value."""
    if model.config.tie_word_embeddings:
        model.tie_weights()
    for name, module in model.named_modules():
        unsaved = [
            key
            for key in module._non_persistent_buffers_set
            if module._buffers.get(key) is not None
        ]
        if not any(module._buffers[key].is_meta for key in unsaved):  # type: ignore[union-attr]
            continue
        for key in unsaved:
            module._buffers[key] = torch.empty_like(module._buffers[key], device="cpu")  # type: ignore[arg-type]
        _owner(model, name)._init_weights(module)
    empty = [
        name
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if tensor.is_meta
    ]
    _none_missing(empty, where)
    return model


def _place(model: nn.Module, name: str, shape: Sequence[int], where: str) -> tuple[nn.Module, str]:
    """The module and the attribute that a tensor belongs to. Error if there is none, or another
    shape."""
    parent, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(parent)
    except AttributeError:
        module = None
    slot = None if module is None else module._parameters.get(leaf, module._buffers.get(leaf))
    if module is None or slot is None:
        raise BadCheckpoint(where, f"tensor {name} has no place in {type(model).__name__}",
                            "the checkpoint does not match its config.json")  # fmt: skip
    if tuple(slot.shape) != tuple(shape):
        raise BadTensor(name, f"shape {tuple(shape)}, {type(model).__name__} wants {tuple(slot.shape)}",
                        "the checkpoint does not match its config.json")  # fmt: skip
    return module, leaf


def _none_missing(names: Sequence[str], where: str) -> None:
    if names:
        raise BadCheckpoint(where, f"tensor {names[0]} is missing ({len(names)} such)",
                            "fetch the checkpoint again, or check that its config.json is its own")  # fmt: skip


def _owner(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """The nearest PreTrainedModel that holds the module called `name`."""
    owner = model
    parts = name.split(".")
    for depth in range(len(parts) + 1):
        module = model.get_submodule(".".join(parts[:depth]))
        if isinstance(module, PreTrainedModel):
            owner = module
    return owner
