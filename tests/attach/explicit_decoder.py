"""A decoder on a mesh with `Explicit` axes, built as those of jax-llm-examples: shardings by logical rules."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, reshard

from kvjax import custom_decoder
from tests.attach.plain_decoder import rotate

RULES = {"batch": "x", "heads": ("y", "z"), "kv_heads": "y", "ffw": ("y", "z"), "vocab": ("y", "z")}
"""Logical axis -> mesh axes; those without a rule are not divided."""

D, N, K, H, F, VOCAB = 8, 4, 2, 32, 16, 24
LAYER = {
    "q": ((D, N, H), (None, "heads", None)),
    "k": ((D, K, H), (None, "kv_heads", None)),
    "v": ((D, K, H), (None, "kv_heads", None)),
    "o": ((N, H, D), ("heads", None, None)),
    "gate": ((D, F), (None, "ffw")),
    "up": ((D, F), (None, "ffw")),
    "down": ((F, D), ("ffw", None)),
}
OUTER = {"embedding": ((VOCAB, D), (None, None)), "head": ((D, VOCAB), (None, "vocab"))}


def by_rules(*logical: str | None) -> PartitionSpec:
    return PartitionSpec(*(None if name is None else RULES[name] for name in logical))


def make_mesh(*shape: int) -> Mesh:
    """A mesh whose axes are `Explicit`, since JAX 0.9 the default."""
    mesh = jax.make_mesh(shape, ("x", "y", "z"), devices=jax.devices()[: np.prod(shape)])
    assert mesh.explicit_axes == ("x", "y", "z")
    return mesh


def make_weights(num_layers: int, mesh: Mesh | None) -> dict[str, Any]:
    """Random weights, on the mesh by the rules."""
    rng = np.random.default_rng(3)

    def make(shape: tuple[int, ...], logical: tuple[str | None, ...]) -> jax.Array:
        x = rng.normal(size=shape).astype(np.float32) / np.sqrt(shape[0])
        return jnp.asarray(x) if mesh is None else jax.device_put(x, NamedSharding(mesh, by_rules(*logical)))

    layers = [{name: make(*of) for name, of in LAYER.items()} for _ in range(num_layers)]
    return {name: make(*of) for name, of in OUTER.items()} | {"layers": layers}


def norm(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def plain_attention(q, k, v, positions):
    """Causal attention over whole texts, [B N T H], written for types: heads are repeated, then stay where they are."""
    k, v = (
        reshard(jnp.repeat(x, N // K, 1, out_sharding=by_rules("batch", None, None, None)), jax.typeof(q).sharding)
        for x in (k, v)
    )
    logits = jnp.einsum("bnth,bnsh->bnts", q, k) / np.sqrt(H)
    is_visible = positions[:, None, None, :] <= positions[:, None, :, None]
    return jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(jnp.where(is_visible, logits, -1e30)), v)


def forward(weights, tokens, positions, cache, **given):
    """Logits of all tokens and the cache; without a cache, by plain attention."""
    cache, above = None if cache is None else dict(cache), None
    x = weights["embedding"].at[tokens].get(out_sharding=by_rules("batch", None, None))
    for i, w in enumerate(weights["layers"]):
        h = norm(x)
        q, k, v = (jnp.einsum("btd,dnh->btnh", h, w[name]) for name in "qkv")
        q, k, v = (jnp.moveaxis(x, 2, 1) for x in (rotate(q, positions), rotate(k, positions), v))
        if cache is None:
            out = plain_attention(q, k, v, positions)
        else:
            out, cache[i], above = custom_decoder.attend(
                cache[i],
                q,
                k,
                v,
                positions,
                hidden=h,
                output_projection=w["o"],
                cross_layer=above,
                layout="BNTH",
                **given,
            )
            assert jax.typeof(out) == jax.typeof(q)
        x = x + jnp.einsum("bnth,nhd->btd", out, w["o"], out_sharding=by_rules("batch", None, None))
        h = norm(x)
        h = jax.nn.silu(jnp.einsum("btd,df->btf", h, w["gate"])) * jnp.einsum("btd,df->btf", h, w["up"])
        x = x + jnp.einsum("btf,fd->btd", h, w["down"], out_sharding=by_rules("batch", None, None))
    return jnp.einsum("btd,dv->btv", norm(x), weights["head"]), cache
