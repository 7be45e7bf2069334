"""Policies that read the hidden states of tokens, in every way in which tokens come to a layer."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import method_api as kv

CONFIG = kvjax.Config.llama(vocab_size=50, width=24, layers=1, heads=4, kv_heads=2, head_dim=8, mlp_width=32)
LENGTHS, STEPS = (13, 9), 3


@dataclasses.dataclass(frozen=True)
class HiddenSums(kv.Policy):
    """Evicts nothing; its state is the sum of each token's hidden vector, f32[B 1 S]."""

    prompt_chunk: int
    needs_hidden = True

    def num_slots(self):
        return 32

    def init(self, spec, block, observation, num_slots):
        # Prompts are padded; none is longer than the slots.
        pos = block.pos[:, :, :num_slots]
        sums = jnp.zeros((pos.shape[0], 1, num_slots))
        if pos.shape[2]:  # none before a prompt that is read in chunks
            sums = sums.at[:, :, : pos.shape[2]].set(observation.hidden_states.sum(3)[:, :, : pos.shape[2]])
        return jnp.where(pos >= 0, jnp.arange(pos.shape[2], dtype=jnp.int32), -1), sums

    def observe_token(self, spec, state, new):
        sums = state.policy_state
        for token in range(new.pos.shape[2]):
            is_new = (state.pos == new.pos[:, :, token, None]) & (state.pos >= 0)
            sums = jnp.where(is_new, new.hidden.sum(3)[:, :, token, None], sums)
        return sums

    def after_token(self, spec, state, weights, q_pos):
        return state.pos, state.policy_state


@pytest.mark.parametrize("prompt_chunk", [0, 4])
def test_a_policy_gets_the_hidden_states_of_the_prompt_and_of_later_tokens(prompt_chunk):
    """Those of the first layer are normed embeddings. No scorer asks for them, so that the policy alone does."""
    model, rng = kvjax.random_model(CONFIG), np.random.default_rng(0)
    texts = [rng.integers(0, 50, n + STEPS).tolist() for n in LENGTHS]
    method = kvjax.Method(decode=HiddenSums(prompt_chunk))
    context = kvjax.read(model, [text[:-STEPS] for text in texts], method, capacity=32)
    state = context.feed([text[-STEPS:] for text in texts]).cache.layers[0]
    for b, text in enumerate(texts):
        x = np.asarray(model.params["embedding"], np.float64)[text]
        normed = x / np.sqrt((x**2).mean(1, keepdims=True) + CONFIG.norm_eps)
        pos = np.asarray(state.pos)[b, 0]
        assert sorted(pos[pos >= 0]) == list(range(len(text)))
        found = np.asarray(state.policy_state)[b, 0][pos >= 0]
        np.testing.assert_allclose(found, normed.sum(1)[pos[pos >= 0]], atol=1e-4)
