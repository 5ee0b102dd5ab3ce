"""Tiny seeded models and a character tokenizer, built in code: no files, no network."""

from __future__ import annotations

import copy
import string

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 128


def build_tokenizer(bos: bool = False) -> PreTrainedTokenizerFast:
    """One token a printable character; with `bos`, <s> before every text."""
    names = ["<s>", "</s>", "<unk>", *string.printable]
    names += [f"<{i}>" for i in range(VOCABULARY - len(names))]
    tokenizer = Tokenizer(
        models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def build_model(seed: int = 0, vocabulary: int = VOCABULARY) -> LlamaForCausalLM:
    """A random Llama in fp32, with weights large enough that its choices are not near ties."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


def perturb(model: LlamaForCausalLM, amount: float, seed: int = 1) -> LlamaForCausalLM:
    """A copy with noise of `amount` times each weight's deviation on its linears."""
    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for module in other.modules():
            if isinstance(module, torch.nn.Linear):
                noise = torch.randn(module.weight.shape, generator=generator)
                module.weight += amount * module.weight.std() * noise
    return other


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """Tiny products gain nothing from threads, and wait long for them on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="session")
def bos_tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(bos=True)


@pytest.fixture(scope="session")
def reference() -> LlamaForCausalLM:
    return build_model()


@pytest.fixture(scope="session")
def candidate(reference: LlamaForCausalLM) -> LlamaForCausalLM:
    return perturb(reference, 0.05)


@pytest.fixture(scope="session")
def make_model():
    return build_model


@pytest.fixture(scope="session")
def make_perturbed():
    return perturb
