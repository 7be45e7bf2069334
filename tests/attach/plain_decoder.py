"""A decoder in plain JAX that knows of kvjax one call, in place of its attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kvjax import custom_decoder


def norm(x, w):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[None, None]


def rotate(x, pos):  # x [B T N H]
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = (jnp.maximum(pos, 0)[..., None].astype(jnp.float32) * frequencies[None, None])[:, :, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1)


def run_layer(w: Any, x, pos, cache, up=None, **given):
    """One layer, with the weights of kvjax' own: (hidden vectors, cache, the value for the layer above)."""
    h, a = norm(x, w["attention_norm"]["scale"]), w["attention"]
    q = jnp.einsum("btd,dkgh->btkgh", h, a["q"]["kernel"])
    q = q.reshape(*q.shape[:2], -1, q.shape[4])
    k, v = (jnp.einsum("btd,dkh->btkh", h, a[name]["kernel"]) for name in "kv")
    o = a["o"]["kernel"].reshape(q.shape[2], v.shape[3], -1)
    out, cache, up = custom_decoder.attend(
        cache, rotate(q, pos), rotate(k, pos), v, pos, hidden=h, output_projection=o, cross_layer=up, **given
    )
    x = x + jnp.einsum("btnh,nhd->btd", out, o)
    h, m = norm(x, w["mlp_norm"]["scale"]), w["mlp"]
    x = x + (jax.nn.silu(h @ m["gate"]["kernel"]) * (h @ m["up"]["kernel"])) @ m["down"]["kernel"]
    return x, cache, up


def forward(params: Any, tokens, pos, cache: dict, **given):
    """Logits of all tokens, and the cache."""
    x, cache, up = params["embedding"][tokens], dict(cache), None
    for i in range(len(cache)):
        x, cache[i], up = run_layer(params[f"layer_{i}"], x, pos, cache[i], up, **given)
    return norm(x, params["final_norm"]["scale"]) @ params["head"]["kernel"], cache
