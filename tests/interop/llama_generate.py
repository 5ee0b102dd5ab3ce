"""Greedy text of a GGUF file by llama.cpp; run by the python of the peer's own environment.

    python llama_generate.py MODEL.gguf PROMPTS.json MAX_TOKENS

llama.cpp comes in the wheel `xllamacpp`, which holds its server, built for CPUs. PROMPTS.json is a
list of strings; llama.cpp puts each through the chat template in the file and through the file's own
tokenizer. Prints one JSON object: llama_cpp (the wheel's version), and for every prompt its
prompt_ids, token_ids, text, margins (log probability of each token less that of the best other one,
in nats) and top (for each token, the TOP most likely ones with their log probabilities).

Settings are llama.cpp's own but for a short context, one slot that keeps nothing from one prompt to
the next, no warm-up, and keys and values in fp32, so that what it rounds is activations. The server
inside listens on the loopback address only.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from importlib.metadata import version
from typing import Any

CONTEXT = 512  # tokens, prompt and answer together
TOP = 20


def ask(address: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """One request to the server of this process."""
    request = urllib.request.Request(
        address + path,
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def main(model: str, prompts_file: str, max_tokens: int) -> None:
    """Load, generate, print."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else writes to stdout
    import xllamacpp  # pyright: ignore[reportMissingImports]

    with open(prompts_file, encoding="utf-8") as file:
        prompts = json.load(file)
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel, params.warmup = CONTEXT, 1, False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    started = time.monotonic()
    server = xllamacpp.Server(params)
    loaded = time.monotonic()
    answers = []
    for prompt in prompts:
        chat = {"messages": [{"role": "user", "content": prompt}]}
        text = ask(server.listening_address, "/apply-template", chat)["prompt"]
        ids = ask(server.listening_address, "/tokenize", {"content": text, "parse_special": True})
        greedy = {"n_predict": max_tokens, "temperature": 0, "n_probs": TOP, "cache_prompt": False}
        said = ask(
            server.listening_address,
            "/completion",
            {"prompt": ids["tokens"], "return_tokens": True, **greedy},
        )
        steps = said["completion_probabilities"]
        top = [[(near["id"], near["logprob"]) for near in step["top_logprobs"]] for step in steps]
        tokens = [step["id"] for step in steps]
        margins = [
            step["logprob"] - max(value for token, value in near if token != step["id"])
            for step, near in zip(steps, top, strict=True)
        ]
        answers.append(
            {
                "prompt_ids": ids["tokens"],
                "token_ids": tokens,
                "text": said["content"],
                "margins": margins,
                "top": top,
            }
        )
    json.dump(
        {
            "llama_cpp": version("xllamacpp"),
            "load_seconds": loaded - started,
            "generate_seconds": time.monotonic() - loaded,
            "answers": answers,
        },
        answer,
    )
    answer.write("\n")
    answer.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
