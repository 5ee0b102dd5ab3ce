"""weightpath serve DIR: an OpenAI-compatible server for one user's machine."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from weightpath.cli.model import BITS, DEVICE, ENGINE, KV_CACHE, NO_CACHE, loaded
from weightpath.cli.show import emit_json, stderr
from weightpath.errors import BadRequest

NAME = "serve"
EXAMPLE = "Example: weightpath serve out --port 8000"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def command(
    folder: str = typer.Argument(help="A low-bit folder of any format, a GGUF file, or a hub id."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on."),
    port: int = typer.Option(8000, min=0, max=65535, help="0 takes a free one."),
    context: int = typer.Option(
        None, min=2, help="Most tokens of a prompt and its reply; without it, the model's own."
    ),
    max_queue: int = typer.Option(
        16, min=0, help="Requests that may wait; one more is answered 429."
    ),
    max_body: int = typer.Option(1 << 20, min=1, help="Bytes of a request; more is answered 413."),
    at_once: int = typer.Option(1, min=1, help="Requests run together, a token of each a step."),
    sessions: int = typer.Option(4, min=1, help="Chats whose cache is kept for their next turn."),
    grace: int = typer.Option(
        60, min=0, help="Seconds that running requests have after SIGTERM or Ctrl-C."
    ),
    api_key: str = typer.Option(
        None, envvar="WEIGHTPATH_API_KEY", help="A key that clients must send; best by variable."
    ),
    model_name: str = typer.Option(
        None, help="What clients call the model; without it, DIR's last part or the id."
    ),
    activation_bits: int = BITS,
    device: str = DEVICE,
    engine: str = ENGINE,
    kv_cache: str = KV_CACHE,
    no_cache: bool = NO_CACHE,
    json: bool = typer.Option(
        False, "--json", help="Print where it listens, and with what limits, as JSON."
    ),
) -> None:
    """Serve a low-bit model as OpenAI's chat and completions do, on this machine."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as missing:
        raise BadRequest(f"serve needs {missing.name}: pip install 'weightpath[serve]'") from None
    from weightpath.checkpoints.locate import place_of
    from weightpath.checkpoints.low_bit import open_low_bit
    from weightpath.engine.generate import stop_ids
    from weightpath.engine.load import load_tokenizer
    from weightpath.engine.session import engine_of
    from weightpath.serve.api import create_app
    from weightpath.serve.defaults import default_sampling
    from weightpath.serve.exchange import Served
    from weightpath.serve.server import listening_socket, make_server, run_server
    from weightpath.serve.worker import Worker

    place = place_of(folder)
    open_low_bit(place)
    tokenizer = load_tokenizer(place)
    bound = listening_socket(host, port)  # a port that is taken is said before the model is loaded
    model = loaded(place, device, activation_bits, engine, kv_cache, no_cache)
    worker = Worker(
        engine_of(model), tokenizer,
        context=context, max_queue=max_queue, sessions=sessions, at_once=at_once,
    )  # fmt: skip
    served = Served(
        name=model_name or (Path(folder).resolve().name if Path(folder).exists() else folder),
        tokenizer=tokenizer,
        worker=worker,
        vocabulary=model.config.get_text_config().vocab_size,
        stop_tokens=tuple(stop_ids(model, tokenizer)),
        defaults=default_sampling(model),
        api_key=api_key or None,
        max_body=max_body,
        created=int(time.time()),
        log=lambda line: stderr.print(f"[dim]{escape(line)}[/dim]"),
    )
    address = f"[{host}]" if ":" in host else host
    facts: dict[str, Any] = {
        "url": f"http://{address}:{bound.getsockname()[1]}/v1", "model": served.name,
        "context": worker.context, "max_queue": max_queue, "max_body": max_body,
        "at_once": at_once, "sessions": sessions, "api_key": served.api_key is not None,
    }  # fmt: skip

    def ready() -> None:
        if json:
            emit_json(facts)
            sys.stdout.flush()
        stderr.print(
            f"{escape(served.name)} at {facts['url']}, context {worker.context}; Ctrl-C ends it",
            highlight=False,
        )
        if host not in LOOPBACK and served.api_key is None:
            stderr.print("warning: other machines reach this without a key; give --api-key")

    run_server(make_server(create_app(served), worker, grace, ready), worker, bound)
