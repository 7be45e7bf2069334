"""Heads of unequal length in pages store each token once and are read as under a mask, with any per-token codec."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.components import HeadBudgets
from kvjax.cache.side_store.paged_heads import PagedHeads
from kvjax.core.memory import array_bytes
from kvjax.core.types import Array, KVBlock
from kvjax.registry.strings import parse
from tests.contract import layer
from tests.oracles import adakv as oracle

SNAPKV = "snapkv:budget=6,window=2,kernel=3"


@dataclasses.dataclass(frozen=True)
class AllToOne(HeadBudgets):
    """Gives one head its tokens up to the whole budget, and the other head the rest."""

    def allocate(self, scores: Array, allowed: Array, num_units: Array, num_always: Array) -> Array:
        one = jnp.minimum(2 * num_units, allowed.sum(-1, dtype=jnp.int32))
        return jnp.stack([2 * num_units - one, one], 1)


@dataclasses.dataclass(frozen=True)
class Twofold:
    """A merge rule in which each kept token stands for two."""

    def __call__(self, block, kept, choice, spec) -> KVBlock:
        return dataclasses.replace(kept, bias=jnp.full(kept.k.shape[:3], np.log(2), jnp.float32))


def bind_paged(text: str, page: int = 4, **components) -> layer.BoundLayer:
    """Binds a method with its heads in pages to the battery's layer."""
    return dataclasses.replace(parse(text), side_store=PagedHeads(AllToOne(), page), **components).bind(layer.spec())


def paged_tokens(bound: layer.BoundLayer, state) -> list[list[list[int]]]:
    """[sequence][head]: the prompt's tokens in the pages, ascending."""
    pos = np.asarray(bound.positions(state))
    return [[sorted(p for p in head.tolist() if p >= 0) for head in sequence] for sequence in pos]


def check_reads_as_under_a_mask(
    bound: layer.BoundLayer, d: layer.SequenceBatch, k: np.ndarray, v: np.ndarray, atol: float
) -> None:
    """Asserts that steps equal dense attention over the tokens in the pages and the decoded ones."""
    state = layer.prefill(bound, d)
    out = layer.decode(bound.method, d, state=state)
    for b, n in enumerate(d.lengths.tolist()):
        for head, kept in enumerate(paged_tokens(bound, state)[b]):
            for t in range(layer.STEPS):
                q = np.asarray(d.q[b, head, :, n + t])
                expected = oracle.attend(q, k[b, head], v[b, head], kept, n + t, n)
                np.testing.assert_allclose(out[b, head, :, t], expected, atol=atol)


@pytest.mark.parametrize("page", [1, 3, 16])
def test_every_token_has_one_slot_whoever_gets_them(page):
    d, bound = layer.random_batch(), bind_paged(SNAPKV, page=page)
    state = layer.prefill(bound, d, padding=1e4)
    tokens = paged_tokens(bound, state)
    assert [[len(head) for head in sequence] for sequence in tokens] == [[3, 9], [1, 1], [6, 6]]
    assert tokens[0][0][1:] == [7, 8] and tokens[0][1] == list(range(9))
    num_pages = -(-(2 * (6 + page - 1) // page) // 2)  # per head of the pool
    assert state.side_store.pos.shape == (3, 2, num_pages * page) and state.side_store.owner.shape == (3, 2, num_pages)
    pages = np.asarray(state.side_store.pos).reshape(3, -1, page)
    for b in range(3):  # an owner's pages follow each other, and only its last one has empty slots
        owner = np.asarray(state.side_store.owner)[b].ravel()
        used = owner[owner >= 0]
        assert (np.diff(used) >= 0).all() and (owner[used.size :] == -1).all() and (pages[b, used.size :] == -1).all()
        for head, count in enumerate(np.bincount(used, minlength=2)):
            assert count == -(-len(tokens[b][head]) // page)


@pytest.mark.parametrize(
    "text",
    [
        SNAPKV,
        SNAPKV + ",unit=chunk2 + offload",
        "keynorm:budget=6,sinks=1",
        "snapkv:budget=7,window=2,kernel=3 + kvcrush:share=0.5",
        SNAPKV + " + int4:rotate=false",
    ],
)
def test_what_is_held_is_read_as_under_a_mask(text):
    d, bound = layer.random_batch(1), bind_paged(text)
    all_pos = jnp.broadcast_to(jnp.arange(d.k.shape[2])[None, None], (layer.B, 1, d.k.shape[2]))
    k, v = (np.asarray(codec.decode(codec.encode(x, all_pos))) for codec, x in ((bound.k, d.k), (bound.v, d.v)))
    check_reads_as_under_a_mask(bound, d, k, v, 5e-6)
    on_host = 2 * layer.B * layer.K * (layer.num_slots(bound) + 2 * 4) * layer.H * 4  # and two pages of four per head
    assert array_bytes(layer.prefill(bound, d))["pinned_host"] == ("offload" in text) * on_host


def test_representatives_are_the_same_for_all_heads_and_the_rest_is_shared():
    d = layer.random_batch(1)
    bound = bind_paged("snapkv:budget=7,window=2,kernel=3 + kvcrush:share=0.5")
    first, second = paged_tokens(bound, layer.prefill(bound, d))[0]
    assert len(first) + len(second) == 2 * 7 and len(set(first) & set(second) - {7, 8}) >= 2


def test_a_bias_is_read_with_its_slot():
    d, bound = layer.random_batch(2), bind_paged(SNAPKV, merge=Twofold())
    state = layer.prefill(bound, d)
    out = layer.decode(bound.method, d, state=state)
    for b, n in enumerate(d.lengths.tolist()):
        for head, kept in enumerate(paged_tokens(bound, state)[b]):
            tokens = [*kept, *kept, n]  # each kept token twice, and the decoded one
            q, k, v = (np.asarray(x[b, head], np.float64) for x in (d.q, d.k, d.v))
            p = np.exp(q[:, n] @ k[tokens].T / np.sqrt(layer.H))
            np.testing.assert_allclose(out[b, head, :, 0], p / p.sum(-1, keepdims=True) @ v[tokens], atol=5e-6)


@pytest.mark.parametrize("count", [35, 7])  # below FEW_QUERIES, the logits of a head's pages lie side by side
def test_many_queries_at_once_are_read_as_few(count):
    d, bound = layer.random_batch(3), bind_paged(SNAPKV)
    state = layer.prefill(bound, d)
    q = jnp.asarray(np.random.default_rng(0).normal(size=(layer.B, layer.K, layer.G, 70, layer.H)), jnp.float32)
    q_pos = jnp.broadcast_to(jnp.arange(20, 90)[None], (layer.B, 70))
    read = jax.jit(bound.method.side_store.read, static_argnums=0)
    outputs = read(bound.storage, state, q, q_pos)
    blocks = [
        read(bound.storage, state, q[:, :, :, first : first + count], q_pos[:, first : first + count])
        for first in range(0, 70, count)
    ]
    for output, *block_outputs in zip(outputs, *blocks, strict=True):
        np.testing.assert_allclose(output, np.concatenate(block_outputs, 3), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("window", [None, 4])
def test_long_pages_are_read_as_short_ones(window):
    d = layer.random_batch(4)
    short, long = (bind_paged(SNAPKV, page=page, merge=Twofold()) for page in (4, 64))
    np.testing.assert_allclose(layer.decode(long.method, d, window), layer.decode(short.method, d, window), atol=1e-6)
