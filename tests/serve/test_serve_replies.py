"""Replies over real HTTP: the model's own text, in OpenAI's shapes, streamed and not."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from running import CHAT, COMPLETIONS, Client, running

from weightpath.engine.generate import encode


def greedy_text(model: Any, tokenizer: Any, ids: list[int], count: int) -> str:
    """transformers' own."""
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)


def chat_ids(tokenizer: Any, *messages: tuple[str, str]) -> list[int]:
    history = [{"role": role, "content": text} for role, text in messages]
    return encode(tokenizer, history)[0].tolist()


def test_chat_streamed_and_not_is_transformers_greedy_text(
    client: Client, model: Any, tokenizer: Any
) -> None:
    wanted = greedy_text(model, tokenizer, chat_ids(tokenizer, ("user", "Hello")), 40)
    whole = client.chat("Hello", max_tokens=40)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": wanted, "refusal": None}  # fmt: skip
    messages = [{"role": "user", "content": "Hello"}]
    chunks = client.stream(CHAT, messages=messages, temperature=0, max_completion_tokens=40)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == wanted
    assert len(chunks) > 20
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]


def test_completions_streamed_and_not_are_transformers_greedy_text(
    client: Client, model: Any, tokenizer: Any
) -> None:
    ids = tokenizer("To be or").input_ids
    wanted = greedy_text(model, tokenizer, ids, 30)
    for prompt in ("To be or", ["To be or"], ids, [ids]):
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 30}
        assert client.post(COMPLETIONS, **body)["choices"][0]["text"] == wanted
    chunks = client.stream(COMPLETIONS, **body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == wanted
    assert len(client.post(COMPLETIONS, prompt="a")["choices"][0]["text"]) <= 16 * 7


def test_a_reply_says_what_made_it_and_what_it_took(client: Client, tokenizer: Any) -> None:
    whole = client.chat("Count", max_tokens=5, model="tiny")
    assert whole["object"] == "chat.completion"
    assert whole["model"] == "tiny"
    assert whole["id"] != client.chat("Count", max_tokens=5)["id"]
    usage = whole["usage"]
    assert usage["prompt_tokens"] == len(chat_ids(tokenizer, ("user", "Count")))
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5
    messages = [{"role": "user", "content": "Count"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 5}
    chunks = client.stream(CHAT, stream_options={"include_usage": True}, **body)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert all("usage" not in chunk for chunk in client.stream(CHAT, **body))


def test_parts_of_text_and_a_system_message_reach_the_template(
    client: Client, model: Any, tokenizer: Any
) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "developer", "content": "S"}, {"role": "user", "content": parts}]
    found = client.post(CHAT, messages=messages, temperature=0, max_tokens=9)
    ids = chat_ids(tokenizer, ("system", "S"), ("user", "Hello"))
    assert found["choices"][0]["message"]["content"] == greedy_text(model, tokenizer, ids, 9)


@pytest.mark.parametrize("as_list", [False, True])
def test_a_stop_string_ends_the_reply_and_is_not_in_it(client: Client, as_list: bool) -> None:
    free = client.chat("Hello", max_tokens=40)["choices"][0]["message"]["content"]
    stop = free[7:10]
    body = {"max_tokens": 40, "stop": ["never!", stop] if as_list else stop}
    choice = client.chat("Hello", **body)["choices"][0]
    assert choice["message"]["content"] == free[: free.find(stop)]
    assert choice["finish_reason"] == "stop"
    messages = [{"role": "user", "content": "Hello"}]
    chunks = client.stream(CHAT, messages=messages, temperature=0, **body)
    joined = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert joined == free[: free.find(stop)]


def test_a_stop_token_of_the_model_ends_the_reply(model: Any, tokenizer: Any) -> None:
    with running(model, tokenizer) as client:
        free = client.chat("Hello", max_tokens=20, logprobs=True)["choices"][0]
        token = free["logprobs"]["content"][4]["token"]
    stop = tokenizer.convert_tokens_to_ids(token)
    with running(model, tokenizer, stop_tokens=(stop,)) as client:
        choice = client.chat("Hello", max_tokens=20)["choices"][0]
    assert choice["finish_reason"] == "stop"
    text = free["message"]["content"]
    assert choice["message"]["content"] == text[: text.find(token)]


def test_log_probabilities_of_a_chat(client: Client, model: Any, tokenizer: Any) -> None:
    choice = client.chat("Hi", max_tokens=6, logprobs=True, top_logprobs=3)["choices"][0]
    rows = choice["logprobs"]["content"]
    ids = chat_ids(tokenizer, ("user", "Hi"))
    for row in rows:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        wanted = logits.double().log_softmax(0).topk(3)
        assert [entry["token"] for entry in row["top_logprobs"]] == [
            tokenizer.decode([i]) for i in wanted.indices
        ]
        found = [entry["logprob"] for entry in row["top_logprobs"]]
        assert found == pytest.approx(wanted.values.tolist(), abs=1e-4)
        assert row["logprob"] == pytest.approx(found[0])
        assert bytes(row["bytes"]).decode() == row["token"]
        ids.append(int(wanted.indices[0]))
    assert len(rows) == 6


def test_log_probabilities_of_a_completion_streamed_and_not(client: Client) -> None:
    body = {"prompt": "To be", "temperature": 0, "max_tokens": 6, "logprobs": 2}
    whole = client.post(COMPLETIONS, **body)["choices"][0]
    found = whole["logprobs"]
    text = "".join(found["tokens"])
    assert text.endswith(whole["text"])  # beside it there are special tokens alone
    assert found["text_offset"][0] == 0
    assert found["text_offset"][-1] == len(text) - len(found["tokens"][-1])
    assert all(len(best) == 2 for best in found["top_logprobs"])
    chunks = [chunk["choices"][0]["logprobs"] for chunk in client.stream(COMPLETIONS, **body)]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [value for chunk in chunks for value in chunk[name]] == pytest.approx(found[name])


def test_a_seed_repeats_a_sampled_reply(client: Client) -> None:
    def said(seed: int) -> str:
        reply = client.chat("Hello", temperature=1.5, seed=seed, max_tokens=20, top_p=0.9)
        return reply["choices"][0]["message"]["content"]

    assert said(1) == said(1) != said(2)
    greedy = client.chat("Hello", max_tokens=20)["choices"][0]["message"]["content"]
    choice = client.chat("Hello", max_tokens=20, temperature=2, top_k=1)["choices"][0]
    assert choice["message"]["content"] == greedy


def test_fields_that_change_no_reply_are_taken(client: Client) -> None:
    harmless = {
        "user": "me", "metadata": {"a": "b"}, "store": False, "n": 1, "tools": [], "logit_bias": None,
        "frequency_penalty": 0, "presence_penalty": 0.0, "response_format": {"type": "text"},
    }  # fmt: skip
    plain = client.chat("Hello", max_tokens=9)["choices"]
    assert client.chat("Hello", max_tokens=9, **harmless)["choices"] == plain


def test_a_chats_next_turn_finds_its_beginning_in_the_cache(model: Any, tokenizer: Any) -> None:
    with running(model, tokenizer) as client:
        said = client.chat("Tell me", max_tokens=12)["choices"][0]["message"]["content"]
        client.chat("another chat altogether", max_tokens=4)
        turn = [("user", "Tell me"), ("assistant", said), ("user", "More")]
        messages = [{"role": role, "content": text} for role, text in turn]
        reply = client.post(CHAT, messages=messages, temperature=0, max_tokens=12)
    first = len(chat_ids(tokenizer, ("user", "Tell me")))
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= first
    wanted = greedy_text(model, tokenizer, chat_ids(tokenizer, *turn), 12)
    assert reply["choices"][0]["message"]["content"] == wanted


def test_chats_under_one_system_message_share_its_cache_and_reply_as_alone(
    model: Any, tokenizer: Any
) -> None:
    system = "Answer in one short sentence, and say nothing else."
    begun = len(tokenizer(f"<|system|>{system}", add_special_tokens=False).input_ids)
    replies = []
    with running(model, tokenizer) as client:
        for text in ("Tell me", "Count", "Why?"):
            messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
            replies.append(client.post(CHAT, messages=messages, temperature=0, max_tokens=12))
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in replies]
    assert cached[0] == 0
    assert min(cached[1:]) >= begun
    for text, one in zip(("Tell me", "Count", "Why?"), replies, strict=True):
        ids = chat_ids(tokenizer, ("system", system), ("user", text))
        assert one["choices"][0]["message"]["content"] == greedy_text(model, tokenizer, ids, 12)


@pytest.mark.parametrize("at_once", [1, 3])
def test_concurrent_requests_get_the_replies_that_they_get_alone(
    model: Any, tokenizer: Any, at_once: int
) -> None:
    prompts = [f"prompt {i} " + "x" * (3 * i) for i in range(8)]
    with running(model, tokenizer, at_once=at_once, max_queue=8) as client:
        found: dict[int, str] = {}

        def one(index: int) -> None:
            chunks = client.stream(
                COMPLETIONS, prompt=prompts[index], temperature=0, max_tokens=10 + index
            )
            found[index] = "".join(chunk["choices"][0]["text"] for chunk in chunks)

        threads = [threading.Thread(target=one, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    for index, prompt in enumerate(prompts):
        ids = tokenizer(prompt).input_ids
        assert found[index] == greedy_text(model, tokenizer, ids, 10 + index)


def test_models_and_health_say_what_is_served(client: Client) -> None:
    listed = client.ask("GET", "/v1/models").body["data"]
    assert [one["id"] for one in listed] == ["tiny"]
    assert client.ask("GET", "/v1/models/tiny").body == listed[0]
    health = client.ask("GET", "/health")
    assert health.status == 200
    assert health.body["status"] == "ok"
    assert (health.body["running"], health.body["waiting"]) == (0, 0)
    assert health.body["context"] == 1024
