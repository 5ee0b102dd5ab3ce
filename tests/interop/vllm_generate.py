"""Greedy text of a checkpoint by vLLM; run by the python of the peer's own environment.

    python vllm_generate.py CHECKPOINT PROMPTS.json MAX_TOKENS

PROMPTS.json is a list of strings, each put through the chat template that the checkpoint carries.
Prints one JSON object: vllm (version), kernels (the classes that multiply the packed weights),
packed (how many modules hold packed weights), and for every prompt its prompt_ids, token_ids, text
and margins (log probability of each token less that of the best other one, in nats).

Everything else, vLLM's log included, goes to stderr. No network: a checkpoint is a folder.
"""

from __future__ import annotations

import json
import os
import sys
import time

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and worker in this process: starts faster
}
CONTEXT = 512  # tokens, prompt and answer together


def kernels(model) -> list[str]:
    """The kernel class of every module that holds packed weights."""
    found = []
    for module in model.modules():
        kernel = getattr(getattr(module, "scheme", None), "kernel", None)
        if kernel is not None:
            found.append(type(kernel).__name__)
    return found


def token_margin(logprobs, token: int) -> float:
    """Log probability of `token` less that of the best other one, nats."""
    others = [entry.logprob for other, entry in logprobs.items() if other != token]
    return logprobs[token].logprob - max(others)


def main(checkpoint: str, prompts_file: str, max_tokens: int) -> None:
    """Load, generate, print."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else writes to stdout
    os.environ.update(SETTINGS)
    import vllm  # pyright: ignore[reportMissingImports]

    with open(prompts_file, encoding="utf-8") as file:
        prompts = json.load(file)
    started = time.monotonic()
    engine = vllm.LLM(
        model=checkpoint,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=CONTEXT,
        max_num_seqs=len(prompts),
        seed=0,
    )
    loaded = time.monotonic()
    tokenizer = engine.get_tokenizer()
    prompt_ids = []
    for prompt in prompts:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        prompt_ids.append(tokenizer(text, add_special_tokens=False).input_ids)
    greedy = vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=2)
    results = engine.generate([{"prompt_token_ids": ids} for ids in prompt_ids], greedy)
    finished = time.monotonic()
    used = engine.apply_model(kernels)[0]
    answers = []
    for ids, result in zip(prompt_ids, results, strict=True):
        output = result.outputs[0]
        tokens = [int(token) for token in output.token_ids]
        margins = [
            token_margin(step, token) for step, token in zip(output.logprobs, tokens, strict=True)
        ]
        answers.append(
            {"prompt_ids": ids, "token_ids": tokens, "text": output.text, "margins": margins}
        )
    json.dump(
        {
            "vllm": vllm.__version__,
            "kernels": sorted(set(used)),
            "packed": len(used),
            "load_seconds": loaded - started,
            "generate_seconds": finished - loaded,
            "answers": answers,
        },
        answer,
    )
    answer.write("\n")
    answer.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
