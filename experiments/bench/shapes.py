"""Shapes of the models that are measured, and the bytes and operations that a step of them needs."""

from __future__ import annotations

from typing import Any

import jax

from kvjax.models import Config

SHAPES = {
    # Byte-level like the shipped model: small matrices, so that everything else decides the speed.
    "small": Config.llama(vocab_size=512, width=256, layers=4, heads=8, kv_heads=4, head_dim=32, mlp_width=512),
    # A Llama of GPT-2's size with an untied head: 134M parameters; a step reads 110M, all but most of the embedding.
    "125m": Config.llama(vocab_size=32_000, width=768, layers=12, heads=12, kv_heads=12, head_dim=64, mlp_width=2048),
}


def describe(name: str, config: Config, params: Any) -> str:
    """One line with the sizes that decide a model's speed."""
    count = sum(x.size for x in jax.tree.leaves(params))
    a = config.kind(0).attention
    return (
        f"{name}: {config.layers} layers, width {config.width}, {a.heads} heads of {a.head_dim} "
        f"({a.kv_heads} KV heads), MLP {config.kind(0).mlp.width}, vocabulary {config.vocab_size}, "
        f"{count / 1e6:.1f}M parameters, {jax.tree.leaves(params)[0].dtype}"
    )


def decode_bytes(config: Config, params: Any, batch: int, context: float) -> float:
    """Least bytes of an exact decode step: all weights once, one embedding per sequence, all keys and values."""
    size = params["embedding"].dtype.itemsize
    # A bound, not an estimate: activations, logits and the written token are left out, since caches can hold them.
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    if not config.tie_embeddings:  # a tied embedding is read in full, as the head
        weights += (batch - config.vocab_size) * config.width * size
    a = config.kind(0).attention
    return weights + 2 * batch * config.layers * a.kv_heads * a.head_dim * context * size


def prefill_flops(config: Config, params: Any, batch: int, tokens: int) -> float:
    """Multiplications and additions of a prefill that computes the last token's logits; causal scores count half."""
    head = config.vocab_size * config.width
    # The embedding is looked up and not multiplied; the head is, once a sequence, whether or not they are tied.
    matrices = sum(x.size for x in jax.tree.leaves(params) if x.ndim > 1) - head * (1 if config.tie_embeddings else 2)
    a = config.kind(0).attention
    attention = 2 * 2 * config.layers * a.heads * a.head_dim * tokens * (tokens + 1) / 2
    return batch * (2 * matrices * tokens + attention + 2 * head)
