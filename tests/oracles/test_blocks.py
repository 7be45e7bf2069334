"""Selections that are made block by block, against a token-by-token oracle; kvpress' BlockPress is in tests/methods."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.testing import toy_model
from tests.contract import layer
from tests.oracles import keydiff

SIZE, BUDGET = 3, 4


def score_by_last_query(q: np.ndarray, k: np.ndarray, held: list[int], t: int) -> np.ndarray:
    """The weights [S] of the query before position t, summed over its group, over the held tokens; its own is first."""
    logits = q[:, t - 1] @ k[held].T / np.sqrt(k.shape[1])
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    total = (weights / weights.sum(-1, keepdims=True)).sum(0)
    return np.where(np.array(held) == t - 1, np.inf, total)


SCORES = {
    "keydiff:budget=4": lambda q, k, held, t: keydiff.scores(k[held]),
    "snapkv:budget=4,window=1,kernel=1": score_by_last_query,
}


def attend_in_blocks(method: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Outputs [G S H] of one head's tokens q [G S H], k, v [S H], and the positions that it holds at the end."""
    held, outs = [], []
    for t in range(len(k)):
        if t % SIZE == 0 and len(held) > BUDGET:
            order = np.argsort(-SCORES[method](q, k, held, t), kind="stable")[:BUDGET]
            held = sorted(held[i] for i in order)
        held.append(t)
        logits = q[:, t] @ k[held].T / np.sqrt(k.shape[1])
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        outs.append(weights / weights.sum(-1, keepdims=True) @ v[held])
    return np.stack(outs, 1), held


@pytest.mark.parametrize("method", SCORES)
def test_a_text_attends_to_what_was_kept_before_each_block(method):
    """All tokens of ragged texts in one call, which the layer cuts into blocks; the last block is not whole."""
    batch, bound = layer.random_batch(3), layer.bind(f"{method} + blocks:size={SIZE}")
    width, lengths = int(layer.TOTAL.max()), layer.TOTAL
    pos = np.where(np.arange(width)[None] < lengths[:, None], np.arange(width)[None], -1)
    block = kvjax.core.types.KVBlock(batch.k, batch.v, jnp.asarray(pos, jnp.int32)[:, None])

    def read(q, block):
        empty = bound.prefill(block.first(0), None, layer.num_slots(bound))
        return bound.extend(empty, q, block, width, None)[:2]

    out, state = jax.jit(read)(batch.q, block)
    for b, n in enumerate(lengths.tolist()):
        for head in range(layer.K):
            expected, held = attend_in_blocks(method, *batch.exact(b, head))
            np.testing.assert_allclose(out[b, head, :, :n], expected, atol=5e-6)
            assert sorted(p for p in state.pos[b, head].tolist() if p >= 0) == held


def test_the_first_layer_keeps_what_it_keeps_of_a_prompt_that_is_attended_in_full():
    """Keys of the first layer come from the tokens alone, and a budget of whole blocks makes blocks begin alike."""
    model, prompts = toy_model(), [[5, 3, 9, 1, 7, 2, 8, 4, 6, 5, 1, 3, 2, 9, 7, 8, 11], [4, 9, 2, 7, 5, 1, 6, 3, 8]]
    kept = []
    for attend in ("kept", "all"):
        method = f"keydiff:budget=8 + blocks:size=4,attend={attend}"
        cache = kvjax.prefill(model, [prompt[: len(prompt) // 4 * 4] for prompt in prompts], method, capacity=32)[1]
        if attend == "kept":  # the last block leaves when the next one begins
            cache = kvjax.extend(model, [prompt[len(prompt) // 4 * 4 :] for prompt in prompts], cache)[1]
        kept.append([[sorted(set(head) - {16, 8}) for head in heads] for heads in kvjax.kept_positions(cache)[0]])
    assert kept[0] == kept[1]


def test_memory_does_not_grow_with_the_prompt():
    bound = kvjax.parse("keydiff:budget=64 + blocks:size=16").bind(layer.spec())
    assert {bound.num_slots(n, 100) for n in (10, 1_000, 1_000_000)} == {64 + 16 + 1}
