"""A decoder in plain JAX equals kvjax' own, with the same weights, under all that a method may ask of it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kvjax import custom_decoder, functional
from kvjax.core import memory
from kvjax.custom_decoder.layer_cache import GIVES
from kvjax.engine.plan import specs
from kvjax.models.model import Model
from kvjax.testing import toy_model
from tests.attach.plain_decoder import forward
from tests.contract.cases import FIRST_CASES
from tests.contract.table import methods_of_every_slot_and_need

SEVERAL_LAYERS = {"a2ats": 2, "cake": 2, "kcache": 2, "kvzip": 2, "minicache": 2, "specache": 2, "tidal_decode": 2}
"""Methods with layers that pass values to each other or share a budget; all others run on one layer."""

NEEDS_OUR_DECODER = {"kvgrad"}
"""Methods that `attach` refuses by name: they differentiate the decoder's layers."""

STRINGS = {name: case.small for name, case in FIRST_CASES.items()} | {
    "adakv": "snapkv:budget=6,window=2,kernel=3 + adakv:page=4,scope=model",
    "dms": "kvzap:budget=8,recent=2 + dms:threshold=-1,decode=true",  # asks for hidden vectors on every step
    "kvzip": "kvzip:budget=5,sinks=1,page=4,plus=true",
    "tidal_decode": "tidal_decode:topk=3,dense=0,reselect=9",
}
LENGTHS, WIDTH, NEW, CAPACITY = np.array([12, 9], np.int32), 12, 8, 32
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 97, (2, WIDTH + NEW)), jnp.int32)
PROMPT_POS = np.where(np.arange(WIDTH) < LENGTHS[:, None], np.arange(WIDTH), -1).astype(np.int32)
STEPS = TOKENS[:, WIDTH:]


SWAP = np.array([1, 0])
SHARING = {"cskv", "matryoshka", "merged_heads"}
"""Methods whose sequences share a calibrated basis; every other array has an entry for each sequence."""

STATES = ("dms", "gear", "h2o", "keyformer", "kivi", "kvquant", "kvtc", "quest", "shadowkv", "tova", "triattention")
"""Methods that put codes, outliers, sums of attention or an index into the state, which the sequences take along."""


def reorder(cache: dict, order: np.ndarray, shares: bool) -> dict:
    """Gives the sequences other places, by the two recipes of docs/your_model.md."""
    if shares or any(map(memory.is_host, jax.tree.leaves(cache))):
        return functional.take(cache, order)
    return jax.tree.map(lambda x: x[order], cache)


@functools.cache
def tiny_model(layers: int) -> Model:
    """A model of the shape for which example tables ship."""
    return toy_model(layers=layers, width=8, head_dim=32, mlp_width=16)


def run_own_decoder(method: str, model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Logits of the prompts' last tokens and of the steps, by `kvjax.functional`."""
    params, plan = model.params, functional.bind(method, model.config)
    last, cache = functional.prefill(params, TOKENS[:, :WIDTH], LENGTHS, plan, model.config, CAPACITY)
    if plan[0].needs.draft_tokens:
        return np.asarray(last), np.asarray(functional.extend(params, STEPS, cache)[0])
    steps = []
    for i in range(NEW):
        logits, cache = functional.extend(params, STEPS[:, i : i + 1], cache)
        steps.append(logits[:, 0])
    return np.asarray(last), np.stack(steps, 1)


@pytest.mark.parametrize("name", sorted({*methods_of_every_slot_and_need(), *SHARING, *STATES}))
def test_a_plain_decoder_equals_ours(name):
    method, model = STRINGS[name], tiny_model(SEVERAL_LAYERS.get(name, 2 if "scope=model" in STRINGS[name] else 1))
    attached = custom_decoder.attach(method, specs(model.config), CAPACITY, gives=GIVES)
    has_drafts = attached[0].layer.bound.needs.draft_tokens > 0

    @jax.jit
    def run(params, tokens, steps):
        logits, cache = forward(params, tokens, PROMPT_POS, attached)
        cache = custom_decoder.finish(
            cache, tokens=tokens, repeat=lambda cache, tokens, pos: forward(params, tokens, pos, cache)[1]
        )
        if has_drafts:
            _, cache = forward(params, steps[:, :1], jnp.asarray(LENGTHS)[:, None], cache, commit=0)

        def step(cache, xs):
            tokens, i = xs
            pos = jnp.asarray(LENGTHS[SWAP])[:, None] + i + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            given = {"commit": 1} if has_drafts else {}
            logits, cache = forward(params, tokens[SWAP], pos, cache, **given)
            return cache, logits[SWAP, 0]

        # A draft is the next token here, so that what is drafted is what comes.
        following = jnp.pad(steps[:, 1:], [(0, 0), (0, 1)])
        fed = jnp.stack([steps, following], 2) if has_drafts else steps[:, :, None]
        # As in a beam search, the sequences change places after the prompt, and their caches with them.
        cache = reorder(cache, SWAP, name in SHARING)
        _, out = lax.scan(step, cache, (jnp.moveaxis(fed, 1, 0), jnp.arange(NEW, dtype=jnp.int32)))
        last = jnp.take_along_axis(logits, jnp.asarray(LENGTHS)[:, None, None] - 1, 1)[:, 0]
        return last, jnp.moveaxis(out, 0, 1)

    last, steps = run(model.params, TOKENS[:, :WIDTH], STEPS)
    own_last, own_steps = run_own_decoder(method, model)
    # Programs of another shape round otherwise: by up to 5.1e-6 (kcache, on a processor with AVX-512).
    np.testing.assert_allclose(last, own_last, atol=1e-5, rtol=0)
    num_compared = NEW - has_drafts  # the last step's draft is unknown to one of the two
    np.testing.assert_allclose(steps[:, :num_compared], own_steps[:, :num_compared], atol=1e-5, rtol=0)
