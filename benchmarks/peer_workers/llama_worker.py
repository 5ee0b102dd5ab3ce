"""llama.cpp's server, from the wheel in .venv-llama or from a binary that the caller names.

    {"do": "load", "gguf", "threads", "context", "server", "batch"} -> {"load_seconds", "first_seconds"}
    {"do": "speed", "prompt": [ids], "steps"} -> {"prefill_seconds", "decode_seconds", "tokens"}
    {"do": "logits", "ids": [ids], "first", "file"} -> {"rows"}    log-probabilities, see below
    {"do": "versions"} -> {"llama.cpp"}      the instruction sets that it was built with, too

server: null for the wheel's (one build for all x86-64 with AVX2), or a llama-server built for the
machine, which is faster. Times of a prompt and of the steps after it are the server's own: HTTP and
the text are not in them. Settings: memory-mapped file, flash attention on, one slot, batches of
`batch` (512), nothing kept from one prompt to the next; keys and values in fp16, its default.

logits: for every i from `first` on, the log-probabilities of the whole vocabulary after ids[: i + 1],
written to `file` as fp32 [rows, vocabulary]. The first is read as a prompt, each later one is a step
of one token on the cache of those before.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from array import array
from importlib.metadata import version
from typing import Any

from loop import answer

FIRST = 8
BATCH = 512
ERRORS = 1  # of the server's log


class Llama:
    """A running server."""

    def __init__(self) -> None:
        self.address = ""
        self.owner: Any = None  # keeps the server of the wheel, or the process of a binary

    def start(self, gguf: str, threads: int, context: int, server: str | None,
              batch: int) -> None:  # fmt: skip
        """Start it, and wait until it answers."""
        if server is None:
            self.owner = wheel_server(gguf, threads, context, batch)
            self.address = self.owner.listening_address
            return
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options = {
            "--model": gguf, "--threads": threads, "--ctx-size": context, "--flash-attn": "on",
            "--parallel": 1, "--batch-size": batch, "--ubatch-size": batch,
            "--threads-batch": threads,
            "--host": "127.0.0.1", "--port": port,
        }  # fmt: skip
        words = [str(word) for pair in options.items() for word in pair]
        self.owner = subprocess.Popen([server, *words, "--no-warmup", "--no-webui"],
                                      stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        self.address = f"http://127.0.0.1:{port}"
        while self.owner.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.address}/health", timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.01)
        raise RuntimeError(f"{server} ended with {self.owner.returncode}")

    def stop(self) -> None:
        if isinstance(self.owner, subprocess.Popen):
            self.owner.terminate()
            self.owner.wait()

    def complete(self, prompt: list[int], count: int) -> dict[str, Any]:
        """`count` greedy tokens after a prompt; the server's answer."""
        body = {
            "prompt": prompt, "n_predict": count, "temperature": 0, "ignore_eos": True,
            "cache_prompt": False, "return_tokens": True,
        }  # fmt: skip
        return self.ask("completion", body)

    def vocabulary(self) -> int:
        with urllib.request.urlopen(f"{self.address}/v1/models", timeout=60) as reply:
            return json.load(reply)["data"][0]["meta"]["n_vocab"]

    def log_probabilities(self, ids: list[int], vocabulary: int) -> array[float]:
        """Of every token after these; what the last call held of them already is not run again."""
        body = {
            "prompt": ids, "n_predict": 1, "temperature": 0, "ignore_eos": True,
            "cache_prompt": True, "n_probs": vocabulary,
        }  # fmt: skip
        (found,) = self.ask("completion", body)["completion_probabilities"]
        if len(found["top_logprobs"]) != vocabulary:
            raise RuntimeError(f"{len(found['top_logprobs'])} log-probabilities of {vocabulary}")
        row = array("f", bytes(4 * vocabulary))
        for one in found["top_logprobs"]:
            row[one["id"]] = one["logprob"]
        return row

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request."""
        request = urllib.request.Request(
            f"{self.address}/{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as reply:
            return json.load(reply)


def wheel_server(gguf: str, threads: int, context: int, batch: int) -> Any:
    """The server inside xllamacpp, in this process."""
    import xllamacpp  # pyright: ignore[reportMissingImports]

    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.n_ctx, params.n_parallel, params.warmup = context, 1, False
    params.verbosity = ERRORS
    params.n_batch = params.n_ubatch = batch
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP
    return xllamacpp.Server(params)


def main() -> None:
    """Answer until the input ends."""
    llama = Llama()

    def load(
        gguf: str, threads: int, context: int, server: str | None, batch: int = BATCH
    ) -> dict[str, Any]:
        start = time.perf_counter()
        llama.start(gguf, threads, context, server, batch)
        loaded = time.perf_counter()
        llama.complete(list(range(FIRST)), 1)
        return {"load_seconds": loaded - start, "first_seconds": time.perf_counter() - start}

    def speed(prompt: list[int], steps: int) -> dict[str, Any]:
        said = llama.complete(prompt, steps + 1)
        times = said["timings"]
        if times["prompt_n"] != len(prompt) or times["predicted_n"] != steps + 1:
            raise RuntimeError(f"read {times['prompt_n']} tokens and wrote {times['predicted_n']}")
        return {
            "prefill_seconds": times["prompt_ms"] / 1e3,
            "decode_seconds": times["predicted_ms"] / 1e3,  # its clock starts at the first token
            "tokens": said["tokens"],
        }

    def logits(ids: list[int], first: int, file: str) -> dict[str, Any]:
        vocabulary = llama.vocabulary()
        with open(file, "wb") as out:
            for i in range(first, len(ids)):
                llama.log_probabilities(ids[: i + 1], vocabulary).tofile(out)
        return {"rows": len(ids) - first}

    def versions(server: str | None) -> dict[str, Any]:
        if server is not None:
            return {"llama.cpp": f"{os.path.basename(server)}, built for this machine"}
        import xllamacpp  # pyright: ignore[reportMissingImports]

        sets = " ".join(part.split(" = ")[0] for part in xllamacpp.get_system_info().split(" | "))
        return {"llama.cpp": f"xllamacpp {version('xllamacpp')} ({sets.strip()})"}

    try:
        answer({"load": load, "speed": speed, "logits": logits, "versions": versions})
    finally:
        llama.stop()


if __name__ == "__main__":
    main()
