"""Text from a model: chat template applied, tokens streamed as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    TextStreamer,
)

from weightpath.errors import BadRequest, CannotRun

Message = dict[str, str]
"""{"role": "system" | "user" | "assistant", "content": text}"""


@dataclass(frozen=True)
class Answer:
    """What a model said. tokens: ids generated; seconds: wall time of prompt and decode together;
    stopped: whether it ended by itself, rather than at the length limit."""

    text: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    seconds: float
    stopped: bool


class _Stream(TextStreamer):
    """Hands finished pieces of text to a function instead of printing them."""

    def __init__(self, tokenizer: Any, emit: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.emit = emit

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.emit(text)


class _Finite(LogitsProcessor):
    """Refuses logits that are NaN or infinite, which decoding would turn into one token over and
    over."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if bool(torch.isfinite(scores).all()):
            return scores
        raise CannotRun(
            f"logits of token {input_ids.shape[1]} are not finite in {scores.dtype} arithmetic; "
            "fp16 ends at 65504: load with dtype=torch.bfloat16, or inspect the weights"
        )


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


def answer(
    model: PreTrainedModel,
    tokenizer: Any,
    messages: Sequence[Message],
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    emit: Callable[[str], None] | None = None,
) -> Answer:
    """Generate a reply to `messages`. temperature 0 is greedy. emit gets text as it is finished.

    BadRequest where the model is no decoder, or has fewer tokens than its tokenizer uses;
    CannotRun for logits that are not finite.
    """
    if not model.can_generate():
        raise BadRequest(f"{type(model).__name__} does not generate text: use a decoder")
    prompt = encode(tokenizer, messages).to(model.device)
    vocabulary = model.config.get_text_config().vocab_size
    if int(prompt.max()) >= vocabulary:
        raise BadRequest(f"the prompt holds token {int(prompt.max())}, the model has {vocabulary} tokens; "
                         "use the tokenizer that belongs to the model")  # fmt: skip
    options: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": max_new_tokens}
    if temperature > 0:
        options |= {"temperature": temperature, "top_p": top_p}
        torch.manual_seed(torch.seed() if seed is None else seed)
    else:
        options |= {"temperature": None, "top_p": None, "top_k": None}
    ends = stop_ids(model, tokenizer)
    started = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(  # type: ignore[operator]
            prompt,
            attention_mask=torch.ones_like(prompt),
            pad_token_id=tokenizer.pad_token_id
            if tokenizer.pad_token_id is not None
            else (ends or [0])[0],
            eos_token_id=ends or None,
            streamer=_Stream(tokenizer, emit) if emit else None,
            logits_processor=LogitsProcessorList([_Finite()]),
            **options,
        )
    seconds = time.perf_counter() - started
    new = output[0, prompt.shape[1] :].tolist()
    return Answer(
        text=tokenizer.decode(new, skip_special_tokens=True).strip(),
        prompt_tokens=prompt.shape[1],
        tokens=tuple(new),
        seconds=seconds,
        stopped=bool(new) and new[-1] in ends,
    )


def stop_ids(model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """Ids that end a reply: the generation config's and the tokenizer's own end of text."""
    config = getattr(model, "generation_config", None)
    ends = getattr(config, "eos_token_id", None)
    found = list(ends) if isinstance(ends, (list, tuple)) else [] if ends is None else [ends]
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in found:
        found.append(tokenizer.eos_token_id)
    return found
