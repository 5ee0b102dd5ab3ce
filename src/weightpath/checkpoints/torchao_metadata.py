"""torchao's metadata in safetensors files: which parameters are of its subclasses, and how.

    tensor_names:   ["MODULE.weight", ...]
    MODULE.weight:  {"_type": "Int4Tensor", "_data": {"block_size": [1, G], "shape": [N, K], ...},
                     "_tensor_data_names": ["qdata", "scale", "zero_point"]}
    MODULE.bias:    {"_type": "Tensor"}

Each value of `__metadata__` is a JSON text. Values of torchao's own types are {"_type", "_data"}
again; none is looked up as a class here. Source: torchao 0.19 (prototype/safetensors).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weightpath.checkpoints.read_linear import FETCH
from weightpath.errors import BadCheckpoint

METHOD = "torchao"
NAMES = "tensor_names"
INT4, INT8, INTX, INT4_XPU = (
    "Int4Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor", "Int4PlainInt32Tensor",
)  # fmt: skip
READ = (INT4, INT8, INTX, INT4_XPU)
REFUSED = {
    "Int4TilePackedTo4dTensor": "the tile layout of CUDA's tinygemm kernel",
    "Int4PreshuffledTensor": "a layout shuffled for one GPU kernel",
    "Int4OpaqueTensor": "a CPU kernel's own layout",
    "IntxOpaqueTensor": "a CPU kernel's own layout",
    "Float8Tensor": "8-bit floats, not integers",
    "MXTensor": "small floats with shared exponents, not integers",
    "NVFP4Tensor": "4-bit floats, not integers",
}
AS_INTEGERS = "save it with Int4WeightOnlyConfig (plain) or Int8WeightOnlyConfig"


@dataclass(frozen=True)
class TorchaoTensor:
    """What the metadata says of one parameter.

    kind: one of READ. parameter: its name in its module, `weight`. bits of a code. block_size:
    rows and columns that share a scale. shape: [N, K] where it is stated. parts: the tensors it
    is stored in. activations: what it asks of activations at run time, or None.
    """

    kind: str
    parameter: str
    bits: int
    block_size: tuple[int, int]
    shape: tuple[int, int] | None
    parts: tuple[str, ...]
    activations: str | None = None

    def suffix(self, part_name: str) -> str:
        """The stored tensor's name within its module: `_weight_qdata`."""
        return f"_{self.parameter}_{part_name}"


def recognise(config: Mapping[str, Any], metadata: Mapping[str, str]) -> str | None:
    """How this is known to be torchao's, as a phrase, or None.

    config is a quantization_config, metadata the `__metadata__` of a safetensors file.
    """
    if config.get("quant_method") == METHOD:
        return f"quant_method {METHOD}"
    if NAMES in metadata:
        return f"{NAMES} in the files' metadata"
    return None


def read_metadata(metadata: Mapping[str, str], where: str) -> dict[str, TorchaoTensor]:
    """Parameters of torchao's subclasses by full name, from the `__metadata__` of the files.

    Of a sharded checkpoint, the files' metadata joined. Plain tensors are left out. BadCheckpoint
    names what is missing or malformed, and a type that is not read, with why.
    """
    names = _json(metadata, NAMES, where)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise BadCheckpoint(
            where, f"metadata {NAMES} is {names!r:.40}, wanted a list of names", FETCH
        )
    found = {}
    for name in names:
        entry = _json(metadata, name, where)
        kind = entry.get("_type") if isinstance(entry, dict) else None
        if not isinstance(entry, dict) or not isinstance(kind, str):
            raise BadCheckpoint(
                where, f"metadata of {name} is {entry!r:.40}, wanted its _type", FETCH
            )
        if kind in READ:
            found[name] = _tensor(name, kind, entry, where)
        elif kind != "Tensor":
            why = REFUSED.get(kind, "not a type known here")
            raise BadCheckpoint(
                where,
                f"{name} is a {kind:.40}, {why}",
                f"{', '.join(READ)} are read: {AS_INTEGERS}",
            )
    return found


def _tensor(name: str, kind: str, entry: Mapping[str, Any], where: str) -> TorchaoTensor:
    """One metadata entry of a type that is read."""
    data, parts = entry.get("_data"), entry.get("_tensor_data_names")
    module, _, parameter = name.rpartition(".")
    if not isinstance(data, dict) or not isinstance(parts, list) or not module:
        raise BadCheckpoint(where, f"metadata of {name} lacks _data or _tensor_data_names", FETCH)
    block = _two(data.get("block_size"), f"metadata of {name}: block_size", where)
    shape = None
    if data.get("shape") is not None:
        shape = _two(data["shape"], f"metadata of {name}: shape", where)
    bits = 8 if kind == INT8 else 4
    if kind == INTX:
        target = data.get("target_dtype")
        named = target.get("_data") if isinstance(target, dict) else None
        if named not in [f"int{width}" for width in range(1, 9)]:
            raise BadCheckpoint(where, f"metadata of {name}: target_dtype is {named!r:.40}, "
                                "wanted int1 to int8", FETCH)  # fmt: skip
        bits = int(named[3:])
    return TorchaoTensor(
        kind,
        parameter,
        bits,
        block,
        shape,
        tuple(map(str, parts)),
        _activations(data),
    )


def _activations(data: Mapping[str, Any]) -> str | None:
    """What a tensor asks of activations at run time; None where they stay 16-bit."""
    if data.get("act_quant_kwargs") is not None or data.get("activation_quantization") is not None:
        return "int8 activations"
    dtype = data.get("activation_dtype")
    named = dtype.get("_data") if isinstance(dtype, dict) else None
    return "8-bit float activations" if isinstance(named, str) and "float8" in named else None


def _two(value: Any, what: str, where: str) -> tuple[int, int]:
    """A list of two sizes, or BadCheckpoint."""
    if isinstance(value, list) and len(value) == 2:
        first, second = value
        if type(first) is int and type(second) is int and min(first, second) > 0:
            return first, second
    raise BadCheckpoint(
        where,
        f"{what} is {value!r:.40}, wanted two whole numbers above 0",
        "fused experts are not read: save one linear each",
    )


def _json(metadata: Mapping[str, str], key: str, where: str) -> Any:
    text = metadata.get(key)
    if not isinstance(text, str):
        raise BadCheckpoint(
            where, f"the files' metadata says nothing of {key}", "a tool dropped it: " + FETCH
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadCheckpoint(where, f"metadata of {key} is no JSON", FETCH) from None
