"""RazorAttention against its oracle: the retrieval heads, and the compensation tokens of the others.

RazorAttention in NumPy (arXiv 2407.15891, section 3): retrieval heads, and attention with a compensation token.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.calibration import table_file
from kvjax.cache.calibration.head_tables import NUM_COPIES, RetrievalHeads
from kvjax.cache.calibration.table_file import TableFile
from kvjax.cache.components import SelectedSlots
from kvjax.cache.eviction.head_budgets import ALL_TOKENS
from kvjax.calibrate import calibrate
from kvjax.core.attention_mass import Observation
from kvjax.core.types import KVBlock
from kvjax.engine.plan import specs
from kvjax.errors import KvjaxError
from kvjax.methods.razor_attention import Compensation, RazorBudgets
from kvjax.testing import toy_model
from tests.contract import layer
from tests.oracles import eviction


def echo_and_induction(a, period: int) -> tuple[float, float]:
    """The scores (echo, induction), as in msmodelslim, of one query head's attention [T T] to a text that repeats."""
    echo, induction = [], []
    for t in range(len(a)):
        for s in range(t - period, -1, -period):
            echo.append(a[t, s])
            induction.append(a[t, s + 1])
    return float(np.mean(echo)), float(np.mean(induction))


def select_retrieval_heads(echo, induction, echo_fraction: float, induction_fraction: float) -> np.ndarray:
    """The retrieval heads, bool[L K], by distinct scores [L K]."""
    is_retrieval = np.zeros(np.shape(echo), bool)
    for scores, fraction in ((echo, echo_fraction), (induction, induction_fraction)):
        order = np.argsort(-np.asarray(scores), axis=None)
        is_retrieval.ravel()[order[: round(fraction * is_retrieval.size)]] = True
    return is_retrieval


def split_prompt(n: int, sinks: int, recent: int, part: int) -> tuple[list[int], list[int]]:
    """Splits n tokens -> (sinks and recent tokens, tokens between them that become one compensation token)."""
    last = max(recent, n // part if part else 0)
    between = list(range(sinks, n - last))
    return [s for s in range(n) if s not in between], between


def attend(q, k, v, exact, compensated, later) -> np.ndarray:
    """Attends with q [G H] to exact and later tokens, and to the compensation token, weighted by its count -> [G H]."""
    visible = [*exact, *later]
    keys, values, count = k[visible], v[visible], np.ones(len(visible))
    if compensated:
        keys = np.vstack([keys, k[compensated].mean(0)])
        values = np.vstack([values, v[compensated].mean(0)])
        count = np.append(count, len(compensated))
    s = q @ keys.T / np.sqrt(q.shape[-1])
    weights = count * np.exp(s - s.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ values


SPEC = dataclasses.replace(layer.spec(), num_layers=5, method_layers=None, num_kv_heads=4)


def write_table(path, echo, induction, spec=None) -> str:
    """Writes a table of scores [L K] and returns its path."""
    tables = [
        {"echo": np.asarray(e, np.float32), "induction": np.asarray(i, np.float32)}
        for e, i in zip(echo, induction, strict=True)
    ]
    return str(table_file.write(path / "retrieval_heads.safetensors", "retrieval_heads", spec or layer.spec(), tables))


@pytest.mark.parametrize(("echo", "induction"), [(0.01, 0.14), (0.1, 0.3), (0, 0), (1, 0)])
def test_the_highest_of_either_score_are_retrieval_heads(tmp_path, echo, induction):
    scores = np.random.default_rng(0).permutation(40).reshape(2, 5, 4)
    rule = RazorBudgets(TableFile(write_table(tmp_path, *scores, SPEC), "retrieval_heads"), echo, induction, 1, 2, 0)
    arrays = [rule.at(dataclasses.replace(SPEC, index=i)).tokens for i in range(5)]
    expected = select_retrieval_heads(*scores, echo, induction)
    np.testing.assert_array_equal(arrays, np.where(expected, ALL_TOKENS, 1 + 2 + 1))


@pytest.mark.parametrize("part", [0, 2])
def test_what_is_lost_is_read_as_its_mean_so_many_times(tmp_path, part):
    batch, table = layer.random_batch(4), write_table(tmp_path, [[0.1, 0.2]], [[0.4, 0.3]])
    text = f"razor_attention:sinks=2,recent=2,part={part},echo=0,induction=0.5,page=2,table={table}"
    bound = layer.bind(text)
    state = layer.prefill(bound, batch, padding=np.inf)
    out, folded = layer.decode(bound.method, batch, state=state), 0
    for b, n in enumerate(batch.lengths.tolist()):
        q, k, v = (np.asarray(x[b], np.float64) for x in (batch.q, batch.k, batch.v))
        for head in range(layer.K):
            exact, between = split_prompt(n, 2, 2, part) if head else (list(range(n)), [])
            folded = max(folded, len(between))
            for t in range(layer.STEPS):
                new_tokens = range(n, n + t + 1)
                expected = attend(q[head, :, n + t], k[head], v[head], exact, between, new_tokens)
                np.testing.assert_allclose(out[b, head, :, t], expected, atol=5e-6)
    assert folded == (5 if part == 0 else 3)
    np.testing.assert_allclose(state.side_store.bias.max(), np.log(folded), rtol=1e-6)


def test_one_lost_token_stays_and_where_none_is_lost_nothing_changes():
    batch = layer.random_batch(5)
    text = "razor_attention:sinks=4,recent={},part=0,induction=0,echo=0,page=4"
    np.testing.assert_allclose(layer.decode(text.format(4), batch), layer.dense_outputs(batch), atol=5e-6)
    assert np.abs(layer.decode(text.format(3), batch)[0] - layer.dense_outputs(batch)[0]).max() > 1e-3


def test_equal_tokens_in_one_give_exact_attention():
    batch = layer.random_batch(6)
    batch = dataclasses.replace(
        batch, **{x: getattr(batch, x).at[:, :, 1:5].set(getattr(batch, x)[:, :, 1:2]) for x in ("k", "v")}
    )
    text = "razor_attention:sinks=1,recent=4,part=0,induction=0,echo=0,page=4"
    np.testing.assert_allclose(layer.decode(text, batch)[0], layer.dense_outputs(batch)[0], atol=5e-6)


def test_scores_of_a_repeated_text_are_the_oracles(tmp_path):
    rng, T, period = np.random.default_rng(1), 20, 5
    q, k = rng.normal(size=(2, 2, T, 8)), rng.normal(size=(2, T, 8))
    wide = [np.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, 3), (0, 0)], constant_values=1e4) for x in (q, k)]
    pos = jnp.asarray(np.where(np.arange(T + 3) < T, np.arange(T + 3), -1), jnp.int32)[None]
    q32, k32 = (jnp.asarray(x, jnp.float32)[None] for x in wide)
    kind, spec = RetrievalHeads(), dataclasses.replace(layer.spec(), head_dim=8)
    counts = jax.jit(lambda block, observation: kind.count(block.clean(), observation, spec))(
        KVBlock(k32, k32, pos[:, None]), Observation(q32, pos)
    )
    arrays = kind.arrays(jax.tree.map(lambda x: np.asarray(x[0], np.float64), counts), spec)
    attention = eviction.attention_weights(q, k)
    for head in range(2):
        expected = [echo_and_induction(a, period) for a in attention[head]]
        np.testing.assert_allclose([arrays["echo"][head], arrays["induction"][head]], np.max(expected, 0), rtol=1e-5)
    ids = kind.documents(50, 1000)[0]
    assert len(ids) == 1000 and ids[:250] * NUM_COPIES == ids and max(ids) < 50


def test_merging_alone_leaves_heads_without_loss_bit_for_bit():
    rng = np.random.default_rng(2)
    k, v = jnp.asarray(rng.normal(size=(2, 1, 2, 6, 4)), jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32), (1, 2, 6))
    block = KVBlock(k, v, positions[:, :1])
    choice = SelectedSlots(positions, None)
    actual = Compensation(1)(block, KVBlock(k, v, positions), choice, layer.spec())
    np.testing.assert_array_equal(actual.k, k)
    np.testing.assert_array_equal(actual.v, v)
    assert not actual.bias.any()


def test_a_table_is_made_without_any_text_and_serves_the_model(tmp_path):
    model = toy_model(max_positions=48)
    path = calibrate(model, "retrieval_heads", tmp_path / "table.safetensors", None)
    method = kvjax.parse(f"razor_attention:sinks=1,recent=2,induction=0.5,table={path}")
    retrieval_heads = {11: 0, 30: 1, 48: 2}  # by the tokens of a layer's two heads in the mean, 48 or 11 each
    assert sum(retrieval_heads[method.bind(spec).num_kept(48)] for spec in specs(model.config)) == 3
    with pytest.raises(KvjaxError, match="a table of heads is counted on a text; give one, as with --text"):
        calibrate(model, "heads", tmp_path / "none", None)
