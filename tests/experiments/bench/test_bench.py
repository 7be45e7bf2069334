"""Each benchmark in miniature: its results and its output, not its speed."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import pytest

import kvjax
from experiments.bench import (
    decode,
    decoders,
    measuring,
    products,
    shapes,
)
from kvjax.testing import toy_model


@pytest.fixture(scope="module")
def toy() -> kvjax.Model:
    return toy_model()


def last_line(capsys) -> dict:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_sides_take_turns_and_every_other_round_is_reversed(monkeypatch):
    monkeypatch.setattr(measuring, "PAUSE_SECONDS", 0.0)
    order = []
    runs = {name: (lambda name=name: order.append(name) or float(len(order))) for name in "abc"}
    seconds = measuring.time_in_turns(runs, 2)
    assert "".join(order) == "abccba"
    assert seconds == {"a": [1.0, 6.0], "b": [2.0, 5.0], "c": [3.0, 4.0]}


def sizes(tied: bool) -> tuple[kvjax.Config, Any]:
    """A configuration, and the shapes of its parameters."""
    config = kvjax.Config.llama(97, 32, 3, heads=4, kv_heads=2, head_dim=8, mlp_width=48, tie_embeddings=tied)
    return config, jax.eval_shape(lambda: kvjax.random_model(config).params)


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_of_a_step_counted_by_hand(tied):
    config, params = sizes(tied)
    # Per layer: two norms, q and o (4 heads of 8), k and v (2 heads of 8), three MLP matrices. 97 tokens, width 32.
    layer = 2 * 32 + 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    weights = 3 * layer + 32 + 97 * 32
    rows = 0 if tied else 5 * 32  # a tied table is read as the head anyway
    cache = 2 * 5 * 3 * 16 * 11
    assert shapes.decode_bytes(config, params, batch=5, context=11) == 4 * (weights + rows + cache)


@pytest.mark.parametrize("tied", [False, True])
def test_operations_of_a_prefill_counted_by_hand(tied):
    config, params = sizes(tied)
    per_token = 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    pairs = sum(t + 1 for t in range(7))  # token t attends to t + 1 tokens: a dot product and a mix of 8 in 4 heads
    once = 2 * (7 * per_token + 3 * 4 * 8 * 2 * pairs + 97 * 32)
    assert shapes.prefill_flops(config, params, batch=2, tokens=7) == 2 * once


def test_weights_reach_the_peer_as_the_same_maps(toy):
    c, rng = toy.config, np.random.default_rng(0)
    peer_weights = dict(decoders.state_dict(c, toy.params))
    assert len(peer_weights) == 3 + 9 * c.layers
    kernels, prefix = toy.params["layer_1"]["attention"], "model.layers.1.self_attn."
    x = rng.normal(size=c.width).astype(np.float32)
    a = c.kind(0).attention
    q = np.einsum("d,dkgh->kgh", x, np.asarray(kernels["q"]["kernel"])).reshape(a.heads, a.head_dim)
    np.testing.assert_allclose((peer_weights[prefix + "q_proj.weight"] @ x).reshape(a.heads, -1), q, atol=1e-5)
    out = np.einsum("kgh,kghd->d", q.reshape(a.kv_heads, a.groups, -1), np.asarray(kernels["o"]["kernel"]))
    np.testing.assert_allclose(peer_weights[prefix + "o_proj.weight"] @ q.reshape(-1), out, atol=1e-4)
    np.testing.assert_array_equal(peer_weights["lm_head.weight"], np.asarray(toy.params["head"]["kernel"]).T)


def test_slices_of_our_loop_are_what_generate_gives(toy):
    ids = np.random.default_rng(0).integers(0, toy.config.vocab_size, (2, 9), np.int32)
    side = decoders.KvjaxDecoder(toy, kvjax.methods.full())
    side.prefill(ids, room=5)
    assert side.decode(2) > 0 and side.decode(3) > 0
    whole = kvjax.generate(toy, ids, "full", max_new_tokens=6, eos_ids=())
    assert side.tokens.tolist() == whole.tokens


def test_decode_stops_when_the_sides_differ():
    class Side:
        def __init__(self, *tokens):
            self.tokens = np.array([tokens])

    decode.check_same_tokens(Side(1, 2), Side(1, 2))
    with pytest.raises(AssertionError, match=r"kvjax \[\[1, 2\]\], transformers \[\[1, 3\]\]"):
        decode.check_same_tokens(Side(1, 2), Side(1, 3))


def test_all_programs_of_a_product_multiply_the_same_weights():
    rng = np.random.default_rng(0)
    x, a, b = (rng.normal(size=s).astype(np.float32) for s in ((4, 8), (8, 16), (16, 8)))
    for multiply, _ in products.PROGRAMS.values():
        np.testing.assert_allclose(products.multiply_all(x, [a, b], multiply), x @ a @ b, rtol=1e-4)


def test_a_tied_head_reaches_the_peer_as_the_embedding():
    model = kvjax.random_model(sizes(tied=True)[0], dtype="bfloat16")
    peer_weights = dict(decoders.state_dict(model.config, model.params))
    np.testing.assert_array_equal(peer_weights["lm_head.weight"], peer_weights["model.embed_tokens.weight"])
    if not decoders.missing_packages():
        module = decoders.TransformersDecoder(model).module
        assert {str(weight.dtype) for weight in module.parameters()} == {"torch.bfloat16"}
        assert module.lm_head.weight.data_ptr() == module.model.embed_tokens.weight.data_ptr()
