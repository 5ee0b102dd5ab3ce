"""What a conversion costs where it cannot be exact: KL divergence before and after.

    python benchmarks/rescue_cost.py [--windows 12]

pycode-42m in 4-bit asymmetric groups of 128, round to nearest, written as a GPTQ v2 file whose
columns are grouped by the size of their weights (act-order's order, by weights instead of
activations), and as an AWQ file in column order. Each is converted, and both source and result are
compared with the model's own bf16: 512 tokens a window in a row, fp32 arithmetic, head 16-bit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from common import finish, shared
from weightpath.checkpoints import awq, gptq
from weightpath.checkpoints.store import open_checkpoint
from weightpath.engine import skeleton
from weightpath.engine.load import load, load_float, load_tokenizer
from weightpath.fidelity.logits import compare
from weightpath.fidelity.metrics import summarize
from weightpath.fidelity.text import read_documents, windows
from weightpath.jobs.convert import convert
from weightpath.quantize.rtn import quantize_rtn
from weightpath.qweight import QWeight
from weightpath.scheme import Scheme

SCHEME = Scheme(4, 128, symmetric=False)


def ordered(name: str, weight: Tensor) -> dict[str, Tensor]:
    """A linear as GPTQ v2, its groups of columns of like size."""
    order = torch.argsort(weight.float().norm(dim=0), descending=True)
    found, _ = quantize_rtn(weight[:, order], SCHEME, torch.float16, name=name)
    codes, g_idx = torch.empty_like(found.codes), torch.empty(len(order), dtype=torch.int32)
    codes[:, order] = found.codes
    g_idx[order] = (torch.arange(len(order)) // SCHEME.group_size).to(torch.int32)
    return gptq.to_tensors(name, replace(found, codes=codes, g_idx=g_idx), "v2")


def in_order(name: str, weight: Tensor) -> dict[str, Tensor]:
    """A linear as AWQ gemm."""
    found: QWeight = quantize_rtn(weight, SCHEME, torch.float16, name=name)[0]
    return awq.to_tensors(name, found)


def write(
    folder: Path, settings: dict[str, Any], pack: Callable[[str, Tensor], dict[str, Tensor]]
) -> None:
    """The model with its linears packed and its head float."""
    source = open_checkpoint(shared("models/pycode-42m"))
    model = skeleton.build(source.config, torch.bfloat16)
    linears = set(skeleton.linears(model)) - {skeleton.head_name(model)}
    tensors: dict[str, Tensor] = {}
    for name in source.tensors:
        module = name.removesuffix(".weight")
        made = pack(module, source.read(name)) if module in linears else {name: source.read(name)}
        tensors |= made
    folder.mkdir()
    for path in source.companions:
        shutil.copyfile(path, folder / path.name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = source.config | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--windows", type=int, default=12)
    options = parser.parse_args()
    place = shared("models/pycode-42m")
    documents, _ = read_documents(shared("data/code-test.txt"))
    cut = windows(load_tokenizer(place), documents, 512, options.windows, contiguous=True)
    reference = load_float(open_checkpoint(place), torch.bfloat16, torch.float32)
    rows: list[dict[str, Any]] = []

    def row(source: str, target: str, folder: Path, exact: int, lossy: int) -> None:
        found = summarize(compare(reference, load(folder, dtype=torch.float32), cut)).to_dict()
        kld, top1 = found["mean_kl"], found["top1"]
        rows.append({"source": source, "target": target, "exact": exact, "lossy": lossy,
                     "mean_kl": kld, "top1": top1})  # fmt: skip
        print(f"| {source} | {target} | {exact} | {lossy} | {kld['value']:.4f} "
              f"({kld['low']:.4f} to {kld['high']:.4f}) | {100 * top1['value']:.1f}% |")  # fmt: skip

    print("| file | converted to | exact | lossy | KLD mean (95%) | top-1 |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        files = {
            "GPTQ v2, act-order": (
                {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False,
                 "desc_act": True, "checkpoint_format": "gptq_v2"},
                ordered, ("gptq", "compressed-tensors", "int8"),
            ),
            "AWQ gemm": (
                {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
                in_order, ("compressed-tensors", "gguf", "int8"),
            ),
        }  # fmt: skip
        for number, (source, (settings, pack, targets)) in enumerate(files.items()):
            folder = Path(scratch) / f"source{number}"
            write(folder, settings, pack)
            row(source, "(as it is)", folder, 0, 0)
            for target in targets:
                out = Path(scratch) / f"out{number}-{target}"
                to = "gptq_v2" if target == "gptq" else target
                done = convert(str(folder), to, out)
                row(source, to, out, done.exact, done.lossy)
    finish("rescue-cost", {"windows": options.windows, "scheme": SCHEME.name, "rows": rows})


if __name__ == "__main__":
    main()
