"""KIVI with heads of unequal length: pages against the oracle, their bytes, and errors."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.codecs.group_quant import Kivi
from kvjax.core.memory import array_bytes
from kvjax.testing import toy_model
from tests.contract import layer
from tests.oracles import kivi as oracle

SNAPKV = "snapkv:budget=6,window=2,kernel=3"
SPECS = [(8, 4, "improved"), (4, 2, "improved"), (2, 4, "improved"), (1, 4, "improved"), (1, 4, "original")]


def method_string(bits: int, group: int, one_bit: str = "improved", page: int = 4, more: str = "") -> str:
    return f"{SNAPKV} + adakv:alpha=0,page={page}{more} + kivi:bits={bits},group={group},residual=4,one_bit={one_bit}"


def attend_visible(q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int) -> np.ndarray:
    """Attends with q [G H] to the tokens of k, v [n H] from `first` on."""
    s = (q @ k[first:].T).astype(np.float64) / np.sqrt(q.shape[1])
    return np.stack([oracle.softmax(weights) for weights in s]) @ v[first:].astype(np.float64)


@pytest.mark.parametrize(("bits", "group", "one_bit"), SPECS)
@pytest.mark.parametrize("scope", ["layer", "model"])
def test_steps_are_the_oracles_over_what_each_head_keeps(bits, group, one_bit, scope):
    batch, method = layer.random_batch(5), method_string(bits, group, one_bit, more=f",scope={scope}")
    bound = layer.bind(method)
    state, unequal = layer.prefill(bound, batch, padding=np.inf), 0
    out, positions = layer.decode(bound.method, batch, state=state), np.asarray(bound.positions(state))
    for b, n in enumerate(batch.lengths.tolist()):
        tokens_of_heads = [sorted(p for p in head.tolist() if p >= 0) for head in positions[b]]
        unequal += len({len(tokens) for tokens in tokens_of_heads}) > 1
        for head, tokens in enumerate(tokens_of_heads):
            q, k, v = (np.asarray(x[b, head]) for x in (batch.q, batch.k, batch.v))
            keys, values = oracle.fake_quantize_pages(k[tokens], v[tokens], bits, group, one_bit)
            decoded = oracle.KiviCache(k[:0], v[:0], bits, group, 4, one_bit)
            for t in range(layer.STEPS):
                decoded.append(k[n + t], v[n + t])
                pages = [
                    np.concatenate(x) for x in ((keys, decoded.visible_keys()), (values, decoded.visible_values()))
                ]
                np.testing.assert_allclose(out[b, head, :, t], attend_visible(q[:, n + t], *pages, 0), atol=5e-6)
                decoded.flush()
    assert unequal


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize(("bits", "H"), [(1, 8), (2, 12), (4, 8), (8, 4)])
def test_a_group_that_is_filled_in_part_is_made_of_its_own_tokens(bits, H, axis, dtype):
    """Pages of 12 slots in groups of 4 restore their tokens, whether or not a page's codes fill their words."""
    rng, page = np.random.default_rng(bits), 12
    lengths = np.array([[[12, 7], [0, 1]], [[12, 12], [4, 0]]])  # tokens of each page [B K P]
    real = (np.arange(page) < lengths[..., None]).reshape(2, 2, -1)
    x = np.where(real[..., None], rng.normal(size=(2, 2, 2 * page, H)), np.nan).astype(dtype)
    codec = Kivi(bits, 4, axis, 8).in_pages(page)
    stored = codec.encode(jnp.asarray(x), jnp.where(real, 5, -1))
    decoded = np.asarray(codec.decode(stored))
    assert decoded.dtype == dtype and np.isfinite(decoded.astype(np.float32)).all()
    pages = x.reshape(-1, page, H)
    for actual, tokens, n in zip(decoded.reshape(-1, page, H), pages, lengths.ravel(), strict=True):
        keys, values = oracle.fake_quantize_pages(tokens[:n], tokens[:n], bits, 4)
        np.testing.assert_array_equal(actual[:n], keys if axis == "channel" else values)
    words = 2 * 2 * 2 * -(-page * H * bits // 32) * 4
    assert array_bytes(stored)["device"] == words + 2 * x.size // 4 * np.dtype(dtype).itemsize


@pytest.mark.parametrize("window", [3, 5])
def test_a_sliding_window_sees_the_same_tokens_as_of_exact_pages(window):
    """Eight bits are all but exact, so the tokens that a query sees decide."""
    batch = layer.random_batch(3)
    exact = layer.decode(f"{SNAPKV} + adakv:alpha=0,page=4", batch, window)
    np.testing.assert_allclose(layer.decode(method_string(8, 4), batch, window), exact, atol=0.06)
    assert np.abs(exact - layer.decode(f"{SNAPKV} + adakv:alpha=0,page=4", batch)).max() > 0.5


@pytest.mark.parametrize("scope", ["layer", "model"])
def test_a_model_reads_whole_and_in_chunks_alike_in_fewer_bytes(scope):
    model, prompts = toy_model(), [list(range(50)), [5], list(range(30, 70))]
    adakv = f"snapkv:budget=12,window=4,kernel=3 + adakv:page=4,scope={scope}"
    method = f"{adakv} + kivi:bits=4,group=4,residual=4"
    full = kvjax.read(model, prompts, method)
    chunks = kvjax.read(model, prompts, method, chunk=8)
    assert full.generate(max_new_tokens=7).tokens == chunks.generate(max_new_tokens=7).tokens
    exact = kvjax.read(model, prompts, adakv)
    for codes, plain in zip(full.kept_positions(), exact.kept_positions(), strict=True):
        for heads, plain_heads in zip(codes, plain, strict=True):
            assert [head.tolist() for head in heads] == [head.tolist() for head in plain_heads]
    assert full.bytes.held["device"] < exact.bytes.held["device"]


def test_what_pages_hold_is_counted_by_their_codes():
    """4 tokens of 8 channels in 4 bits are 16 bytes, and their groups have 8 scales and 8 minima."""
    model = toy_model(kv_heads=2)
    method = "snapkv:budget=12,window=4,kernel=3 + adakv:page=4 + kivi:bits=4,group=4,residual=4"
    context = kvjax.read(model, [list(range(50))], method, headroom=16)
    a_page = 2 * (16 + 2 * 8 * 4) + 4 * 4
    for state, bound in zip(context.cache.layers, context.cache.plan, strict=True):
        pages = state.side_store.owner.size
        without_owners = dataclasses.replace(state.side_store, owner=state.side_store.owner[..., :0])
        assert array_bytes(without_owners)["device"] == pages * a_page
        used = int((np.asarray(state.side_store.owner) >= 0).sum())
        assert bound.method.side_store.empty_bytes(state.side_store)["device"] == (pages - used) * a_page
