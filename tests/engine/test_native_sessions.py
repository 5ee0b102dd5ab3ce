"""Sessions of the native engine: cuts, caches, threads and company change no bit of a result."""

from __future__ import annotations

import threading

import pytest
import torch
from native_models import divergence, family, some_ids, wanted_logits
from torch import Tensor

from tiny_checkpoint import build_model
from weightpath.engine.decode import NativeModel, Session
from weightpath.errors import BadRequest
from weightpath.nn.swap import quantize_model

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = ["llama-nine-heads", "qwen3", "mistral-window", "qwen2-window-in-one-layer"]


def low_bit(scheme: str = "w4g32", kind: str = "llama") -> NativeModel:
    """A tiny model on low-bit linears with an int8 head."""
    model = build_model(kind)
    quantize_model(model, scheme)
    return NativeModel(model)


def one_by_one(session: Session, ids: list[int]) -> Tensor:
    return torch.stack([session.extend([token]).clone() for token in ids])


@pytest.mark.parametrize("cache", ["bf16", "int8", "fp32"])
@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_in_one_piece_in_many_and_token_by_token_gives_the_same_bits(
    name: str, cache: str
) -> None:
    model, ids = family(name), some_ids(290)
    whole = NativeModel(model, cache=cache, chunk=512).session().all_logits(ids)
    native = NativeModel(model, cache=cache, chunk=48)
    assert torch.equal(native.session().all_logits(ids), whole)
    assert torch.equal(one_by_one(native.session(), ids), whole)
    session, found = native.session(), []
    for cut in (1, 7, 120, 2, 160):
        found.append(session.all_logits(ids[len(session.tokens) : len(session.tokens) + cut]))
    assert torch.equal(torch.cat(found), whole)


@pytest.mark.parametrize("scheme", ["int8", "w4g32", "w4g32-asym", "w4a8g32"])
def test_low_bit_linears_give_the_same_bits_however_a_prompt_is_cut(scheme: str) -> None:
    native, ids = low_bit(scheme), some_ids(200)
    assert torch.equal(one_by_one(native.session(), ids), native.session().all_logits(ids))


@pytest.mark.parametrize("threads", [2, 3, 16])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    model = build_model("llama", hidden_size=288, num_attention_heads=9, num_key_value_heads=3)
    quantize_model(model, "w4g32")
    ids = some_ids(300)
    alone = NativeModel(model, threads=1).session()
    together = NativeModel(model, threads=threads).session()
    assert torch.equal(together.all_logits(ids), alone.all_logits(ids))
    for token in some_ids(6, seed=2):
        assert torch.equal(together.extend([token]), alone.extend([token]))


@pytest.mark.parametrize("scheme", ["w4g32", "w4a8g32", "int8"])
def test_one_to_sixteen_threads_write_the_same_greedy_text(scheme: str) -> None:
    model = build_model("llama", hidden_size=288, num_attention_heads=9, num_key_value_heads=3)
    quantize_model(model, scheme)
    native, prompt = NativeModel(model, chunk=64), some_ids(150)
    texts, logits = set(), []
    for threads in range(1, 17):
        native.threads = threads
        session, text = native.session(), []
        logits.append(session.extend(prompt).clone())
        while len(text) < 12:
            text.append(int((logits[-1] if not text else session.extend(text[-1:])).argmax()))
        texts.add(tuple(text))
    assert len(texts) == 1
    assert all(torch.equal(one, logits[0]) for one in logits)


@pytest.mark.parametrize("name", ["llama-nine-heads", "llama-head-64", "llama-head-80"])
def test_a_prompt_that_goes_on_at_an_odd_position_gives_the_same_bits_on_many_threads(
    name: str,
) -> None:
    model, ids = family(name), some_ids(200)
    whole = NativeModel(model, threads=1).session().all_logits(ids)
    native = NativeModel(model, threads=5)
    for begin in (1, 3, 15, 31, 33):
        session = native.session()
        assert torch.equal(session.all_logits(ids[:begin]), whole[:begin])
        assert torch.equal(session.all_logits(ids[begin:]), whole[begin:])


def test_what_was_truncated_leaves_no_trace() -> None:
    native, ids = low_bit(), some_ids(300)
    used, fresh = native.session(), native.session()
    used.extend(some_ids(270, seed=5))
    for length in (200, 131, 128, 1, 0):
        used.truncate(length)
    assert torch.equal(used.extend(ids), fresh.extend(ids))
    used.truncate(137)
    fresh.truncate(0)
    assert used.tokens == ids[:137]
    fresh.extend(ids[:137])
    assert torch.equal(used.extend([3, 4]), fresh.extend([3, 4]))


@pytest.mark.parametrize("cache", ["bf16", "int8", "fp32"])
@pytest.mark.parametrize("name", KINDS)
def test_a_session_that_adopts_anothers_beginning_gives_the_bits_of_one_that_ran_it(
    name: str, cache: str
) -> None:
    native, ids, rest = NativeModel(family(name), cache=cache), some_ids(280), some_ids(20, seed=7)
    source, taken = native.session(), native.session(context=300)
    source.extend(ids)
    for length in (1, 127, 128, 129, 260, 0):
        taken.truncate(0)
        taken.extend(some_ids(200, seed=9))
        assert taken.adopt(source, length)
        assert taken.tokens == ids[:length]
        fresh = native.session()
        if length:
            fresh.extend(ids[:length])
        assert torch.equal(taken.extend(rest), fresh.extend(rest))
    before = native.session()
    before.extend(ids)
    assert torch.equal(source.extend(rest), before.extend(rest))  # it was only read


def test_what_a_session_cannot_adopt_is_said_in_one_line() -> None:
    native, other = NativeModel(build_model("llama")), NativeModel(build_model("llama"))
    source, short = native.session(), native.session(context=8)
    source.extend(some_ids(20))
    for call, said in (
        (lambda: short.adopt(source, 9), "adopt 9 tokens of 20 into a context of 8"),
        (lambda: native.session().adopt(source, 21), "adopt 21 tokens of 20"),
        (lambda: other.session().adopt(source, 3), "a session of another model"),
    ):
        with pytest.raises(BadRequest, match=said):
            call()


def test_infinities_that_were_truncated_leave_no_trace() -> None:
    model = build_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = float("nan")  # type: ignore[index, union-attr]
    native, ids = NativeModel(model), [token for token in some_ids(40) if token != 7]
    session = native.session()
    assert session.extend([1, 2, 7, 7, 7]).isnan().all()
    session.truncate(0)
    assert torch.equal(one_by_one(session, ids), one_by_one(native.session(), ids))


def test_a_step_of_many_sequences_gives_each_what_it_gets_alone() -> None:
    native = low_bit("w4g32", "qwen2")
    prompts = [some_ids(count, seed=count) for count in (1, 5, 127, 128, 129, 260)]
    together, alone = ([native.session() for _ in prompts] for _ in range(2))
    for a, b, prompt in zip(together, alone, prompts, strict=True):
        a.extend(prompt)
        b.extend(prompt)
    for token in (3, 9, 27):
        ids = [token + i for i in range(len(prompts))]
        found = native.extend_many(together, ids)
        assert torch.equal(
            found, torch.stack([s.extend([i]) for s, i in zip(alone, ids, strict=True)])
        )
    assert [s.tokens for s in together] == [s.tokens for s in alone]


def test_more_sequences_than_rows_of_a_step_take_several() -> None:
    native = NativeModel(build_model("llama"), chunk=4)
    sessions = [native.session() for _ in range(10)]
    found = native.extend_many(sessions, list(range(10)))
    wanted = torch.stack([native.session().extend([i]).clone() for i in range(10)])
    assert torch.equal(found, wanted)


def test_two_python_threads_with_a_session_each_do_not_disturb_one_another() -> None:
    native = low_bit()
    native.threads = 2
    prompts = [some_ids(60, seed=1), some_ids(75, seed=2)]
    wanted = [one_by_one(native.session(), prompt) for prompt in prompts]
    found: dict[int, Tensor] = {}

    def run(index: int) -> None:
        found[index] = one_by_one(native.session(), prompts[index])

    workers = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(torch.equal(found[index], wanted[index]) for index in range(2))


def test_eight_thousand_tokens_of_context_agree_with_transformers() -> None:
    model = build_model("llama", max_position_embeddings=8192)
    native, ids = NativeModel(model, cache="fp32"), some_ids(8191)
    session = native.session()
    assert session.context == 8192
    last = session.extend(ids).clone()
    with torch.no_grad():
        wanted = model(torch.tensor([[*ids, 5]]), logits_to_keep=2).logits[0]  # type: ignore[operator]
    assert (last - wanted[0]).abs().max() < 1e-3 * wanted.abs().max()
    native.threads = 3  # the one token's blocks are shared out
    assert (session.extend([5]) - wanted[1]).abs().max() < 1e-3 * wanted.abs().max()
    with pytest.raises(BadRequest, match="a context of 8192 tokens: 8192 held and 1 more"):
        session.extend([5])


def test_a_new_longer_session_leaves_older_ones_right() -> None:
    model = build_model("llama", max_position_embeddings=1024)
    native, ids = NativeModel(model), some_ids(20)
    short = native.session(context=32)
    short.extend(ids[:10])
    native.session(context=700).extend(ids)
    assert torch.equal(short.extend(ids[10:]), native.session(context=32).extend(ids))


def test_the_int8_cache_is_half_the_bf16_one_and_costs_little() -> None:
    model, ids = build_model("llama", head_dim=64), some_ids(200)
    wanted = wanted_logits(model, ids)
    eight, sixteen = NativeModel(model, cache="int8"), NativeModel(model, cache="bf16")
    assert 0.5 <= eight.cache_bytes(1024) / sixteen.cache_bytes(1024) <= 0.54
    assert divergence(eight.session().all_logits(ids), wanted) < 1e-3


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda n: n.session().extend([]), "extend by no tokens"),
        (lambda n: n.session().extend([128]), "token 128 of a vocabulary of 128"),
        (lambda n: n.session().extend([-1]), "token -1"),
        (lambda n: n.session(context=0), "context 0: the model takes 1 to"),
        (lambda n: n.session(context=1 << 20), "context 1048576: the model takes 1 to"),
        (lambda n: n.session(context=3).extend([1, 2, 3, 4]), "0 held and 4 more"),
        (lambda n: n.session().truncate(1), "truncate to 1 of 0 tokens"),
        (lambda n: n.extend_many([n.session()], [1, 2]), "1 sessions and 2 tokens"),
        (lambda n: n.extend_many([s := n.session(), s], [1, 2]), "a session is named twice"),
    ],
)
def test_what_cannot_be_had_is_said_in_one_line(call, said: str) -> None:
    native = NativeModel(build_model("llama"))
    with pytest.raises(BadRequest, match=said) as refused:
        call(native)
    assert "\n" not in str(refused.value)


def test_a_refused_token_leaves_the_session_as_it_was() -> None:
    native = NativeModel(build_model("llama"))
    session = native.session()
    session.extend([1, 2, 3])
    with pytest.raises(BadRequest):
        session.extend([4, 999])
    assert session.tokens == [1, 2, 3]
    assert torch.equal(session.extend([4]).clone(), native.session().extend([1, 2, 3, 4]))


def test_the_profile_counts_every_phase_only_while_it_is_on() -> None:
    native = NativeModel(build_model("llama"))
    native.session().extend([1, 2, 3])
    assert set(native.nanoseconds().values()) == {0}
    native.profile()
    native.session().extend([1, 2, 3])
    counted = native.nanoseconds()
    assert min(counted.values()) >= 0  # a phase may be shorter than the clock's step
    assert all(counted[phase] > 0 for phase in ("qkv", "gate_up", "down", "head")), counted
