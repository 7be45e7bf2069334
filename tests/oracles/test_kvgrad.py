"""KVgrad against its oracle, through a model.

The oracle is a decoder in float64, differentiated by its attention outputs, and KVzip's scores in NumPy, from kvpress'
KVgradPress and the formula of its paper: of one sequence, with each repetition run as one long prompt of its own.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import custom_decoder
from kvjax.engine.plan import specs
from kvjax.errors import KvjaxError
from kvjax.testing import toy_model
from tests.oracles.test_kvzip import CHUNK, LEAD, PROMPTS, SINKS, chunk_scores

BUDGET = 6
T = max(map(len, PROMPTS)) + LEAD + CHUNK


@functools.partial(jax.jit, static_argnames="eps")
@functools.partial(jax.grad, has_aux=True)
def differentiate(added: jax.Array, params: Any, tokens: jax.Array, is_copy: jax.Array, eps: float) -> Any:
    """The sum of squares of the last layer's outputs of the copy, and (q, k, v) of each layer.

    It is a function of what is added to the attention outputs, [L T D]. The tokens [T] are padded behind the copy.
    """

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale[None]

    def rotate(x: jax.Array) -> jax.Array:
        half = x.shape[-1] // 2
        angles = np.arange(T)[:, None] * 10_000.0 ** (-np.arange(half)[None] / half)
        angles = angles.reshape(*(1,) * (x.ndim - 2), *angles.shape)
        cos, sin, a, b = np.cos(angles), np.sin(angles), x[..., :half], x[..., half:]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    arrays, x = [], params["embedding"][tokens]
    for i, offset in enumerate(added):
        layer = params[f"layer_{i}"]
        kernels = {name: part["kernel"] for name, part in (layer["attention"] | layer["mlp"]).items()}
        y = norm(x, layer["attention_norm"]["scale"])
        q = rotate(jnp.einsum("td,dkgh->kgth", y, kernels["q"]))
        k, v = (jnp.einsum("td,dkh->kth", y, kernels[name]) for name in "kv")
        k = rotate(k)
        logits = jnp.einsum("kgth,ksh->kgts", q, k) / np.sqrt(q.shape[-1])
        weights = jax.nn.softmax(jnp.where(np.tri(T, dtype=bool)[None, None], logits, -np.inf), -1)
        x = x + jnp.einsum("kgts,ksh,kghd->td", weights, v, kernels["o"]) + offset
        y = norm(x, layer["mlp_norm"]["scale"])
        x = x + (jax.nn.silu(y @ kernels["gate"]) * (y @ kernels["up"])) @ kernels["down"]
        arrays.append((q, k, v))
    return jnp.where(is_copy[:, None], x * x, 0).sum(), arrays


def oracle_scores(model: kvjax.Model, tokens: list[int], by_gradient: bool = True) -> list[np.ndarray]:
    """The scores [K S] of each layer's tokens; those of a gradient of 1 show what it changes."""
    c, n, a = model.config, len(tokens), model.config.kind(0).attention
    scores = [np.zeros((a.kv_heads, n)) for _ in range(c.layers)]
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), model.params)
        for start in range(0, n, CHUNK):
            end = min(start + CHUNK, n)
            text = [*tokens, *tokens[max(0, start - LEAD) : end]]
            m, pos = len(text), np.arange(T)
            padded, added = np.pad(text, (0, T - m)), jnp.zeros((c.layers, T, c.width), jnp.float64)
            gradient, arrays = differentiate(added, params, padded, (pos >= n) & (pos < m), c.norm_eps)
            norms = np.linalg.norm(np.asarray(gradient)[:, n:m], axis=-1) if by_gradient else np.ones((c.layers, m - n))
            for i, qkv in enumerate(arrays):
                q, k, v = (np.asarray(x)[..., :m, :] for x in qkv)
                output = np.asarray(params[f"layer_{i}"]["attention"]["o"]["kernel"])
                for head in range(a.kv_heads):
                    value_norms = np.linalg.norm(np.einsum("sh,ghd->gsd", v[head, start:end], output[head]), axis=-1)
                    repeated = q[head, :, n:], k[head, :n], k[head, n:]
                    scores[i][head, start:end] = chunk_scores(*repeated, start, end, SINKS, value_norms, 1 / norms[i])
    return scores


def test_a_ragged_batch_keeps_the_tokens_that_the_last_hidden_states_depend_on():
    model = toy_model(layers=2)
    method = kvjax.methods.kvgrad(BUDGET, CHUNK, LEAD, SINKS, level="head")
    positions = kvjax.kept_positions(kvjax.prefill(model, PROMPTS, method)[1])

    def best(scores: np.ndarray) -> list[int]:
        return [*range(SINKS), *sorted(SINKS + np.argsort(-scores[SINKS:], kind="stable")[: BUDGET - SINKS])]

    changed = 0
    for b, tokens in enumerate(PROMPTS):
        by_gradient, by_norms = oracle_scores(model, tokens), oracle_scores(model, tokens, by_gradient=False)
        for i, (scores, others) in enumerate(zip(by_gradient, by_norms, strict=True)):
            for head, (head_scores, other) in enumerate(zip(scores, others, strict=True)):
                assert positions[i][b][head].tolist() == best(head_scores)[: len(tokens)]
                changed += best(head_scores) != best(other)
    assert changed


def test_prompts_on_the_host_and_decoders_of_others_are_refused_by_name():
    model = toy_model(layers=2)
    with pytest.raises(KvjaxError, match='differentiates a pass through all layers.*leave prompt_memory at "device"'):
        kvjax.prefill(model, PROMPTS, "kvgrad:budget=6", prompt_memory="host")
    with pytest.raises(
        KvjaxError, match="differentiates a second pass.*write the model as a kvjax Config, or use kvzip"
    ):
        custom_decoder.attach("kvgrad:budget=6", specs(model.config), 32, gives=("repeat", "output_projection"))
