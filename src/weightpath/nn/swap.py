"""Put low-bit linears into a built model, switch their kernels, and count its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from weightpath.errors import BadRequest
from weightpath.nn.int4_linear import Int4Linear
from weightpath.nn.int8_linear import Int8Linear
from weightpath.nn.low_bit_linear import LowBitLinear
from weightpath.scheme import INT8, Scheme

READ_THE_WEIGHT = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules of torch that read the weights of their linears past `forward`."""


@dataclass(frozen=True)
class Swapped:
    """What `quantize_model` replaced: name -> scheme; and what it left float, name -> why."""

    replaced: dict[str, Scheme]
    kept: dict[str, str]

    def __len__(self) -> int:
        return len(self.replaced)


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of persistent weights. matmul: what a decode step reads whole. embedding: tables of
    which a step reads only the rows it looks up. rest: norms, biases, scales of nothing else."""

    matmul: int
    embedding: int
    rest: int

    @property
    def total(self) -> int:
        return self.matmul + self.embedding + self.rest


@dataclass(frozen=True)
class Switched:
    """What `set_backend` did: linear -> its kernel now; and linear -> what was repacked for it."""

    kernels: dict[str, str]
    repacked: dict[str, str]

    def __len__(self) -> int:
        return len(self.kernels)


def low_bit_linears(model: nn.Module) -> Iterator[tuple[str, LowBitLinear]]:
    """(name, module) of every low-bit linear in a model."""
    for name, module in model.named_modules():
        if isinstance(module, LowBitLinear):
            yield name, module


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Set the submodule called `name` (dotted)."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def quantize_model(
    model: nn.Module,
    scheme: Scheme | str = "int8",
    head: Scheme | str | None = "int8",
    skip: Callable[[str], bool] | None = None,
) -> Swapped:
    """Replace every linear of `model` in place and say how many and which.

    scheme: for all linears; one whose in_features the group does not divide becomes int8.
    head: for the output head (None keeps it float). A head tied to the embedding gets its own
    low-bit copy and the embedding keeps the original. skip(name) keeps a linear float. So does a
    module that is more than a linear: a subclass with a forward of its own, or one whose weight
    torch reads past its forward (the projection of nn.MultiheadAttention).
    """
    if isinstance(model, nn.Linear):
        raise BadRequest("the model is itself a linear: use Int8Linear or Int4Linear.from_linear")
    scheme = Scheme.parse(scheme) if isinstance(scheme, str) else scheme
    head_scheme = Scheme.parse(head) if isinstance(head, str) else head
    find_head = getattr(model, "get_output_embeddings", None)
    head_module = find_head() if callable(find_head) else None
    replaced: dict[str, Scheme] = {}
    kept: dict[str, str] = {}
    bound = _more_than_linear(model)
    places: dict[int, list[str]] = {}  # a module used at several names is one linear
    for name, module in model.named_modules(remove_duplicate=False):
        places.setdefault(id(module), []).append(name)
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        chosen = head_scheme if module is head_module else scheme
        if chosen is None:
            kept[name] = "the head was asked to stay float"
            continue
        if skip is not None and skip(name):
            kept[name] = "named in skip"
            continue
        if id(module) in bound:
            kept[name] = bound[id(module)]
            continue
        if chosen.bits != 8 and not chosen.divides(module.in_features):
            chosen = INT8
        low = _quantize(module, chosen, f"{name}.weight")
        low.train(module.training)
        for place in places[id(module)]:
            replace_module(model, place, low)
        replaced[name] = chosen
        if module is head_module and getattr(
            getattr(model, "config", None), "tie_word_embeddings", False
        ):
            model.config.tie_word_embeddings = False  # type: ignore[union-attr]
    return Swapped(replaced, kept)


def _more_than_linear(model: nn.Module) -> dict[int, str]:
    """id -> why, for linears that must not be replaced: their weight is used otherwise too."""
    found: dict[int, str] = {}
    for parent in model.modules():
        for child in parent.children():
            if not isinstance(child, nn.Linear):
                continue
            if isinstance(parent, READ_THE_WEIGHT):
                found[id(child)] = f"{type(parent).__name__} reads its weight itself"
            elif type(child).forward is not nn.Linear.forward:
                found[id(child)] = f"{type(child).__name__} has a forward of its own"
    return found


def _quantize(linear: nn.Linear, scheme: Scheme, name: str) -> LowBitLinear:
    if scheme == INT8:
        return Int8Linear.from_linear(linear, name)
    if scheme.bits == 4:
        return Int4Linear.from_linear(linear, scheme, name)
    raise BadRequest(f"scheme {scheme.name}: modules take int8 per channel or 4-bit groups")


def set_backend(model: nn.Module, backend: str | None) -> Switched:
    """Use the kernel `backend` in every low-bit linear (None: the chooser's).

    Codes stay where they are when both kernels read the same form, and are repacked, one linear at
    a time, where they do not. CannotRun, before anything is changed, if one of them cannot run it.
    """
    modules = dict(low_bit_linears(model))
    for module in modules.values():
        module.refuse_or(backend)
    repacked = {name: module.set_backend(backend) for name, module in modules.items()}
    return Switched(
        {name: module.kernel.name for name, module in modules.items()},
        {name: what for name, what in repacked.items() if what},
    )


def weight_bytes(model: nn.Module, float_bytes: int | None = None) -> WeightBytes:
    """Bytes of a model's persistent weights (parameters and saved buffers; no rotary tables).

    float_bytes counts float tensors at that width (2 for a bf16 deployment of an fp32 model);
    integer tensors and the scales of low-bit linears count as stored. A tied matrix counts once,
    under matmul.
    """
    seen: set[int] = set()

    def size(tensor: Tensor | None, as_stored: bool = False) -> int:
        if tensor is None or id(tensor) in seen:
            return 0
        seen.add(id(tensor))
        width = tensor.element_size()
        if float_bytes is not None and tensor.is_floating_point() and not as_stored:
            width = float_bytes
        return tensor.numel() * width

    matmul = embedding = rest = 0
    modules = list(model.modules())
    for module in modules:
        if isinstance(module, LowBitLinear):
            matmul += sum(size(buffer, as_stored=True) for buffer in module.buffers(recurse=False))
        elif isinstance(module, nn.Linear):
            matmul += size(module.weight)
    for module in modules:
        if isinstance(module, nn.Embedding):
            embedding += size(module.weight)
    for module in modules:
        saved = set(dict(module.named_buffers(recurse=False))) - module._non_persistent_buffers_set
        tensors: list[Tensor | None] = list(module._parameters.values())
        tensors += [module._buffers[name] for name in saved]
        rest += sum(size(tensor) for tensor in tensors)
    return WeightBytes(matmul, embedding, rest)


def explain(model: nn.Module) -> dict[str, dict[str, object]]:
    """For every low-bit linear: its scheme, the kernel and instruction set that run it, and why not
    the others."""
    report: dict[str, dict[str, object]] = {}
    for name, module in low_bit_linears(model):
        choice = module.kernel
        report[name] = {
            "scheme": module.scheme.name,
            "kernel": choice.name,
            "instruction_set": choice.instruction_set,
            "rejected": [list(row) for row in choice.rejected],
        }
    return report


def set_activation_bits(model: nn.Module, bits: int) -> int:
    """Run every 4-bit linear with activations of `bits` (8 or 16); returns how many."""
    count = 0
    for _, module in low_bit_linears(model):
        if isinstance(module, Int4Linear):
            module.scheme = module.scheme.with_activations(bits)
            count += 1
    return count


__all__ = [
    "Int4Linear", "Int8Linear", "LowBitLinear", "Swapped", "Switched", "WeightBytes", "explain", "low_bit_linears",
    "quantize_model", "replace_module", "set_activation_bits", "set_backend", "weight_bytes",
]  # fmt: skip
