"""Text from a model: chat template applied, tokens streamed as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedModel

from weightpath.engine.sampling import Sampling, TokenLogprob
from weightpath.engine.session import Session, open_session
from weightpath.engine.stream import STOP, Limits, Reply, joined, stream
from weightpath.errors import BadRequest

Message = dict[str, str]
"""{"role": "system" | "user" | "assistant", "content": text}"""


@dataclass(frozen=True)
class Answer:
    """What a model said. tokens: ids generated; seconds: wall time of prompt and decode together,
    and of each; stopped: whether it ended by itself or at a stop, and finish says how: "stop",
    "length", "cancelled" or "failed", error saying why. cached_tokens: of the prompt, not run
    again. logprobs: one a token, where asked for."""

    text: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    seconds: float
    stopped: bool
    finish: str = STOP
    cached_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str = ""


def encode(tokenizer: Any, messages: Sequence[Message]) -> torch.Tensor:
    """Prompt ids int64 [1, L], L >= 1: through the chat template where the tokenizer has one, else
    the contents joined as plain text. BadRequest where the template refuses them, or for no text."""
    special = True
    text = "\n".join(message["content"] for message in messages)
    if getattr(tokenizer, "chat_template", None):
        special = False
        try:
            text = tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise BadRequest(f"the chat template refuses messages of {roles} ({error}); leave out --system, "
                             "or mend the template")  from None  # fmt: skip
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=special).input_ids
    if not ids.shape[1]:
        raise BadRequest("the prompt is empty; give it some text")
    return ids


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of plain text, with the special tokens that the tokenizer puts before it."""
    return tokenizer(text, add_special_tokens=True).input_ids


def answer(
    model: PreTrainedModel,
    tokenizer: Any,
    messages: Sequence[Message],
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    emit: Callable[[str], None] | None = None,
    *,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: Sequence[str] = (),
    logprobs: int | None = None,
    session: Session | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Answer:
    """Generate a reply to `messages`. temperature 0 is greedy. emit gets text as it is finished.

    Settings as in `sampling.Sampling`. stop: strings that end the reply. logprobs: how many of the
    most likely tokens to give with each. session: of the model, kept from turn to turn, so that
    only what is new is run. cancelled: asked before every token.
    BadRequest where the model is no decoder, or has fewer tokens than its tokenizer uses;
    CannotRun for logits that are not finite.
    """
    session = open_session(model) if session is None else session
    prompt = encode(tokenizer, messages)[0].tolist()
    check_vocabulary(model, prompt)
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    limits = Limits(max_new_tokens, tuple(stop_ids(model, tokenizer)), tuple(stop))
    pieces = []
    for piece in stream(session, tokenizer, prompt, sampling, limits, logprobs, cancelled):
        pieces.append(piece)
        if emit is not None and piece.text:
            emit(piece.text)
    return answer_of(joined(pieces), logprobs is not None)


def answer_of(reply: Reply, logprobs: bool) -> Answer:
    """A reply as an answer, its text without the space around it."""
    usage = reply.usage
    return Answer(
        text=reply.text.strip(),
        prompt_tokens=usage.prompt_tokens,
        tokens=tuple(token.token for token in reply.tokens),
        seconds=usage.prefill_seconds + usage.decode_seconds,
        stopped=reply.finish == STOP,
        finish=reply.finish,
        cached_tokens=usage.cached_tokens,
        prefill_seconds=usage.prefill_seconds,
        decode_seconds=usage.decode_seconds,
        logprobs=reply.tokens if logprobs else (),
        error="" if reply.error is None else str(reply.error) or type(reply.error).__name__,
    )


def check_vocabulary(model: PreTrainedModel, prompt: Sequence[int]) -> None:
    """BadRequest where the prompt holds an id that the model has no row for."""
    vocabulary = model.config.get_text_config().vocab_size
    highest = max(prompt, default=0)
    if highest >= vocabulary or min(prompt, default=0) < 0:
        raise BadRequest(f"the prompt holds token {highest}, the model has {vocabulary} tokens; "
                         "use the tokenizer that belongs to the model")  # fmt: skip


def stop_ids(model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """Ids that end a reply: the generation config's and the tokenizer's own end of text."""
    config = getattr(model, "generation_config", None)
    ends = getattr(config, "eos_token_id", None)
    found = list(ends) if isinstance(ends, (list, tuple)) else [] if ends is None else [ends]
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in found:
        found.append(tokenizer.eos_token_id)
    return found
