"""AWQ and GPTQ files of a tiny seeded model by their own writers, and what these read back.

    python write_low_bit.py FOLDER

Run by the python of an environment that has GPTQModel and auto-round. For every entry of CASES,
FOLDER/NAME/ gets the checkpoint and FOLDER/NAME.safetensors the weights that the writer's own reader
multiplies with, fp16 [N, K] by module. A weight is read by handing the writer's layer the identity:
every sum then has one term, so the product is the dequantized weight and nothing else. GPTQModel
loads its folders itself. auto-round has no CPU loader for asymmetric GPTQ, so its tensors go into the
layer class that it packs the format with. Prints one JSON object: the versions, and by case the
folder, the layer class and the number of layers.

The model is a Llama of 2 layers, hidden 128, intermediate 256, 4 query and 2 key-value heads and 64
tokens; GPTQ and AWQ calibrate on seeded random tokens, auto-round rounds to nearest.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

GPTQMODEL: dict[str, dict[str, Any]] = {
    "gptqmodel-v1-sym": {},
    "gptqmodel-v1-asym": {"sym": False},
    "gptqmodel-v2-asym": {"sym": False, "format": "gptq_v2"},
    "gptqmodel-v1-asym-ordered": {"sym": False, "desc_act": True},
    "gptqmodel-v1-asym-static-groups": {"sym": False, "desc_act": True, "static_groups": True},
    "gptqmodel-v2-asym-2bit": {"sym": False, "bits": 2, "format": "gptq_v2"},
    "gptqmodel-v1-asym-3bit": {"sym": False, "bits": 3},
    "gptqmodel-v1-sym-8bit-channel": {"bits": 8, "group_size": -1, "act_group_aware": False},
    "gptqmodel-planar-asym-3bit": {"sym": False, "bits": 3, "format": "gptq_p"},
    "gptqmodel-v2-asym-int16-words": {"sym": False, "format": "gptq_v2", "pack_dtype": "int16"},
    "gptqmodel-awq-gemm-asym": {"sym": False, "method": "awq", "format": "gemm"},
}
"""QuantizeConfig arguments beside 4 bits, groups of 32, symmetric, GPTQ v1, no act-order."""

AUTOROUND: dict[str, dict[str, Any]] = {
    "autoround-gptq-sym": {"format": "auto_gptq"},
    "autoround-gptq-asym": {"format": "auto_gptq", "sym": False},
    "autoround-awq-sym": {"format": "auto_awq"},
    "autoround-awq-asym": {"format": "auto_awq", "sym": False},
    "autoround-own-sym": {"format": "auto_round"},
    "autoround-own-asym-3bit": {"format": "auto_round", "sym": False, "bits": 3},
}
"""Format and scheme, beside 4 bits, groups of 32, symmetric."""

CASES = (*GPTQMODEL, *AUTOROUND)
TOKENS, LENGTH, SAMPLES = 64, 32, 8
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "GPTQMODEL_CPU_WORKERS": "2",  # on two cores it starts one, then asks for two and refuses
    "TORCHDYNAMO_DISABLE": "1",  # it compiles each layer it reads, which takes ten times as long
}


def make_model(folder: Path) -> None:
    """The float model, saved in fp16 with a tokenizer."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=TOKENS,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).half().save_pretrained(folder)
    words = {f"t{token}": token for token in range(TOKENS)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")),
        eos_token="t2",
        pad_token="t2",
    )
    tokenizer.save_pretrained(folder)


def samples() -> Any:
    """Seeded token ids, int64 [SAMPLES, LENGTH]."""
    import torch

    return torch.randint(0, TOKENS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))


def weights(layers: dict[str, Callable[[Any], Any]], sizes: dict[str, int]) -> dict[str, Any]:
    """What each layer multiplies the identity by, fp16 [N, K]. sizes: K by layer."""
    import torch

    with torch.inference_mode():
        return {
            name: layer(torch.eye(sizes[name], dtype=torch.float16)).reshape(sizes[name], -1).t()
            for name, layer in layers.items()
        }


def by_gptqmodel(source: Path, folder: Path, options: dict[str, Any]) -> tuple[Path, str, Any]:
    """Quantize and save with GPTQModel, load with it; the folder, the layer class, the weights."""
    import torch
    from gptqmodel import (  # pyright: ignore[reportMissingImports]
        BACKEND,
        GPTQModel,
        QuantizeConfig,
    )
    from gptqmodel.nn_modules.qlinear import BaseQuantLinear  # pyright: ignore[reportMissingImports]

    chosen = {"bits": 4, "group_size": 32, "sym": True, "desc_act": False, **options}
    config = QuantizeConfig(device="cpu", offload_to_disk=False, pack_impl="original", **chosen)
    model = GPTQModel.load(str(source), config, dtype=torch.float16)
    model.quantize([{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])}
                    for row in samples()], batch_size=1)  # fmt: skip
    model.save(str(folder))
    awq = options.get("method") == "awq"
    backend = BACKEND.AWQ_TORCH if awq else BACKEND.GPTQ_TORCH
    read = GPTQModel.load(str(folder), device="cpu", backend=backend, dtype=torch.float16)
    layers = {
        name: layer
        for name, layer in read.model.named_modules()
        if isinstance(layer, BaseQuantLinear)
    }
    kinds = {type(layer).__name__ for layer in layers.values()}
    sizes = {name: layer.in_features for name, layer in layers.items()}
    return folder, ", ".join(sorted(kinds)), weights(layers, sizes)


def by_autoround(source: Path, folder: Path, options: dict[str, Any]) -> tuple[Path, str, Any]:
    """Round and save with auto-round, read into its own layers; the same three."""
    import torch
    from auto_round import AutoRound  # pyright: ignore[reportMissingImports]
    from auto_round.export.export_to_autoround.export import (  # pyright: ignore[reportMissingImports]
        dynamic_import_quant_linear_for_packing,
    )
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    chosen = {"bits": 4, "group_size": 32, "sym": True, **options}
    kind = chosen.pop("format")
    rounder = AutoRound(
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16),
        tokenizer=AutoTokenizer.from_pretrained(source),
        iters=0,
        disable_opt_rtn=True,
        disable_model_free=True,
        device_map="cpu",
        enable_torch_compile=False,
        dataset=[row[None] for row in samples()],
        nsamples=SAMPLES,
        seqlen=LENGTH,
        **chosen,
    )
    _, written = rounder.quantize_and_save(str(folder), format=kind)
    written = Path(written)
    config = json.loads((written / "config.json").read_text(encoding="utf-8"))
    kind = config["quantization_config"].get("packing_format", kind)
    bits, group = chosen["bits"], chosen["group_size"]
    make = dynamic_import_quant_linear_for_packing(kind, bits, group, chosen["sym"])
    parts: dict[str, dict[str, Any]] = {}
    for name, tensor in load_file(written / "model.safetensors").items():
        module, _, part = name.rpartition(".")
        parts.setdefault(module, {})[part] = tensor
    layers, sizes = {}, {}
    for name, own in parts.items():
        if "qweight" not in own:
            continue
        rows, n = own["qweight"].shape[0], own["scales"].shape[1]
        k = rows if "awq" in kind else rows * 32 // bits
        layers[name] = make(bits, group, k, n, False, *(("cpu",) if "awq" in kind else ()))
        own.pop("g_idx", None)  # k // group_size; its loader drops it, its layer cuts N to K by it
        layers[name].load_state_dict(own)
        sizes[name] = k
    classes = {f"{type(layer).__module__}.{type(layer).__name__}" for layer in layers.values()}
    return written, ", ".join(sorted(classes)), weights(layers, sizes)


def main(folder: Path) -> None:
    """Write every case, read it back, print."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else writes to stdout
    os.environ.update(SETTINGS)
    from importlib.metadata import version

    from safetensors.torch import save_file

    source = folder / "float"
    make_model(source)
    done = {}
    for cases, write in ((GPTQMODEL, by_gptqmodel), (AUTOROUND, by_autoround)):
        for name, options in cases.items():
            where, layer, read = write(source, folder / name, options)
            save_file(
                {module: weight.contiguous() for module, weight in read.items()},
                folder / f"{name}.safetensors",
            )
            done[name] = {"folder": str(where), "layer": layer, "layers": len(read)}
    packages = ("gptqmodel", "auto-round", "torch", "transformers")
    json.dump({"versions": {name: version(name) for name in packages}, "cases": done}, answer)
    answer.write("\n")
    answer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
