"""A small GGUF of a tiny Llama with a byte-level vocabulary, for tests of the verbs."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from tiny_checkpoint import build_model

LETTERS = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
"""How byte-level BPE writes the printable bytes; the rest are the letters from 256 on."""
PLACES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_tiny_gguf(path: Path) -> Path:
    """Q8_0 linears and F32 norms; 259 tokens: start, end, the 256 bytes and "he"."""
    tokens = ["<|start|>", "<|end|>", *LETTERS, *(chr(256 + i) for i in range(68)), "he"]
    model = build_model("llama", vocab_size=len(tokens))
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(tokens) - 2)])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, parameter in model.state_dict().items():
        module = name.removesuffix(".weight")
        if module.startswith("model.layers."):
            _, _, layer, part = module.split(".", 3)
            place = f"blk.{layer}.{PLACES[part]}.weight"
        else:
            place = f"{PLACES[module]}.weight"
        values: np.ndarray = parameter.float().numpy()
        if values.ndim == 1:
            writer.add_tensor(place, values)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(place, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
