"""State that a layer keeps for a sequence whatever its length: linear attention and state spaces.

A layer with such a state keeps, in elements a sequence,

    convolution   (kernel - 1) * channels      the last inputs, in the model's dtype
    recurrent     as below                     the running sum, in the state's dtype

    family              channels                                     recurrent
    gated delta net     2 k_heads k_dim + v_heads v_dim              v_heads v_dim k_dim
    delta attention     3 heads dim                                  heads dim dim
    Mamba 2             inner + 2 groups state                       heads head_dim state
    Mamba 1             inner                                        inner state
    RG-LRU              width                                        width
    lightning           none                                         heads dim dim (model's dtype)
    short convolution   hidden                                       none

The first row is the source selector's formula (shared reference, section A); the others are read
from transformers 5.24 and checked against its caches (tests/paths/test_kv_caches.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from weightpath.paths.kv_fields import Fields

HEADS = (
    "decoder_attention_heads", "num_decoder_attention_heads", "num_attention_heads", "n_head",
    "n_heads", "num_heads",
)  # fmt: skip
WIDTHS = ("hidden_size", "d_model", "n_embd")
"""What families call the query heads and the width of their decoder."""


@dataclass(frozen=True)
class StateCache:
    """One layer's state. channels, kernel: of the convolution (0: none). recurrent: elements.

    in_model_dtype: the recurrent part is kept in the model's dtype and not in the state's.
    kind: "linear_attention", "state_space" or "short_convolution".
    """

    kind: str
    family: str
    channels: int
    kernel: int
    recurrent: int
    in_model_dtype: bool = False

    def nbytes(self, model_bytes: int, state_bytes: int, columns: int | None = None) -> int:
        """Bytes a sequence. columns: kept of the convolution's inputs; default, kernel - 1."""
        kept = max(self.kernel - 1, 0) if columns is None else columns
        each = model_bytes if self.in_model_dtype else state_bytes
        return kept * self.channels * model_bytes + self.recurrent * each


def state_cache(fields: Fields, conv: bool) -> StateCache:
    """The state of a "linear" layer, or of a "conv" layer; the family by the fields there are.

    BadCheckpoint names the first field that is missing.
    """
    has = fields.values.get
    if conv:
        channels = fields.need("conv_dim", "hidden_size") if has("conv_dim") else _hidden(fields)
        return StateCache("short_convolution", "short convolution", channels,
                          fields.need("conv_L_cache"), 0)  # fmt: skip
    if has("linear_num_value_heads") is not None or has("linear_key_head_dim") is not None:
        return _gated_delta_net(fields)
    if has("linear_num_heads") is not None or isinstance(has("linear_attn_config"), dict):
        return _delta_attention(fields)
    if has("lru_width") is not None:
        width = fields.need("lru_width")
        return StateCache("linear_attention", "RG-LRU", width, fields.need("conv1d_width"), width)
    if has("mamba_d_state") or has("ssm_state_size") or has("state_size"):
        return _mamba(fields)
    if str(has("model_type")).startswith("minimax") or has("attn_type_list") is not None:
        heads, dim = fields.need("num_attention_heads"), head_dim(fields)
        return StateCache("linear_attention", "lightning", 0, 0, heads * dim * dim, True)
    raise fields.missing("linear_num_value_heads", "linear_num_heads", "mamba_d_state",
                         "state_size", "lru_width")  # fmt: skip


def _gated_delta_net(fields: Fields) -> StateCache:
    key_heads = fields.need("linear_num_key_heads")
    key_dim = fields.need("linear_key_head_dim")
    value_heads = fields.need("linear_num_value_heads")
    value_dim = fields.need("linear_value_head_dim")
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    recurrent = value_heads * value_dim * key_dim
    return StateCache("linear_attention", "gated delta net", channels,
                      fields.need("linear_conv_kernel_dim"), recurrent)  # fmt: skip


def _delta_attention(fields: Fields) -> StateCache:
    """Kimi delta attention; checkpoints hold its numbers in linear_attn_config."""
    nested = fields.values.get("linear_attn_config")
    if fields.values.get("linear_num_heads") is None and isinstance(nested, dict):
        inner = Fields(nested, f"{fields.where} linear_attn_config", fields.used)
        heads, dim = inner.need("num_heads"), inner.need("head_dim")
        kernel = inner.need("short_conv_kernel_size")
    else:
        heads, dim = fields.need("linear_num_heads"), fields.need("linear_head_dim")
        kernel = fields.need("linear_conv_kernel_dim")
    return StateCache("linear_attention", "delta attention", 3 * heads * dim, kernel,
                      heads * dim * dim)  # fmt: skip


def _mamba(fields: Fields) -> StateCache:
    """Mamba 2 where there are heads and groups, else Mamba 1."""
    state = fields.need("mamba_d_state", "ssm_state_size", "state_size")
    kernel = fields.need("mamba_d_conv", "conv_kernel")
    groups = fields.first("mamba_n_groups", "mamba_ngroups", "n_groups")
    heads = fields.first("mamba_n_heads", "n_mamba_heads", "mamba_num_heads")
    if heads is None and groups is not None:
        heads = fields.need("num_heads")
    if heads is None or groups is None:
        inner = _inner(fields, None)
        return StateCache("state_space", "Mamba 1", inner, kernel, inner * state)
    inner = _inner(fields, heads)
    return StateCache("state_space", "Mamba 2", inner + 2 * groups * state, kernel, inner * state)


def _inner(fields: Fields, heads: int | None) -> int:
    """The inner width of a Mamba layer: said, or heads x head_dim, or hidden_size x expand."""
    if (said := fields.first("mamba_d_ssm")) is not None:
        return said
    each = fields.get(
        "mamba_head_dim" if heads and "mamba_head_dim" in fields.values else "mamba_d_head"
    )
    if heads and isinstance(each, int) and not isinstance(each, bool):
        return heads * each
    expand = fields.get("mamba_expand") or fields.get("expand")
    if not isinstance(expand, (int, float)) or isinstance(expand, bool) or expand <= 0:
        raise fields.missing("mamba_expand", "expand")
    return int(expand * _hidden(fields))


def _hidden(fields: Fields) -> int:
    return fields.need(*WIDTHS)


def head_dim(fields: Fields) -> int:
    """head_dim, or hidden_size / num_attention_heads. BadCheckpoint where that is not whole."""
    said = fields.first("head_dim", "attention_head_dim", "d_kv", "kv_channels")
    if said is not None:
        return said
    heads = attention_heads(fields)
    if fields.first(*WIDTHS) is None:
        raise fields.missing("head_dim", "hidden_size")
    hidden = _hidden(fields)
    if hidden % heads:
        raise fields.missing("head_dim")
    return hidden // heads


def attention_heads(fields: Fields) -> int:
    """Query heads of the decoder."""
    found = fields.first(*HEADS)
    if found is None:
        raise fields.missing("num_attention_heads", "n_head", "decoder_attention_heads")
    return found
