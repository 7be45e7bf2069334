"""Gradients of a repetition, which the engine takes a layer at a time, equal those of one pass through all layers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.eviction.selection import make_selection
from kvjax.cache.method import Method
from kvjax.core.attention import causal_attention
from kvjax.engine.forward import Target, embed, layer_calls, outer_params
from kvjax.engine.plan import bind
from kvjax.engine.prefill import prefill_exactly
from kvjax.methods.kvgrad import GradientAttention
from kvjax.models import decoder
from tests.engine.test_reading_layers import CONFIG, model

N = 9


@dataclasses.dataclass(frozen=True)
class GradientNorms(GradientAttention):
    """Scores a token by the gradient at its copy."""

    def update_scores(self, block, start, observation, new, before, spec):
        return jnp.broadcast_to(observation.gradient_norms[:, None], before.shape)


def norms_of_one_pass(tokens: np.ndarray) -> list[np.ndarray]:
    """The norms [n] of each layer, of a text that is followed by itself."""
    params, n = model().params, len(tokens)
    twice = jnp.asarray(np.tile(tokens, 2)[None], jnp.int32)

    def squares(added):
        hidden, angles, _ = embed(outer_params(params), twice, None, None, target=Target(CONFIG))
        exact = {}
        for i in range(CONFIG.layers):
            kind = CONFIG.kind(i)

            def attend(_, q, k, v, x, i=i, a=kind.attention):
                exact[i] = (k, v) if a.reads_layer is None else exact[a.reads_layer]
                return causal_attention(q, *exact[i], rule=a.rule, sinks=decoder.sinks_of(params[f"layer_{i}"])), None

            layer = decoder.Layer(CONFIG, 0, hidden.dtype, kind)
            variables = {"params": params[f"layer_{i}"], "perturbations": {"attention_output": added[i]}}
            hidden, _ = layer.apply(variables, hidden, angles, attend)
        return jnp.square(hidden[:, n:]).sum()

    gradient = jax.jit(jax.grad(squares))(jnp.zeros((CONFIG.layers, 1, 2 * n, CONFIG.width)))
    return list(np.linalg.norm(np.asarray(gradient)[:, 0, n:], axis=-1))


def test_layers_that_read_others_and_padding_get_the_gradients_of_one_pass():
    """Windows, soft caps, sinks, and layers that read keys and values of others, whose gradients pass through these."""
    scorer = GradientNorms(chunk=N, lead=0, sinks=0, has_instructions=False)
    method = Method(select=make_selection(scorer, 4), windowed="method")
    tokens, lengths = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (2, N)), np.array([N, 7])
    calls = layer_calls(bind(method, CONFIG), CONFIG)
    arrays = jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)
    _, prompts = prefill_exactly(model().params, *arrays, calls, Target(CONFIG))
    expected = norms_of_one_pass(tokens[1, : lengths[1]])
    for i in (0, 1):  # the layers with keys and values of their own
        np.testing.assert_allclose(prompts[i].replay_scores[1, 0, : lengths[1]], expected[i], rtol=2e-4)
        assert not prompts[i].replay_scores[1, :, lengths[1] :].any()
