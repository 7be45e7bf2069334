"""What codecs hand on that are around another one: a prompt's queries, a place in a window, tokens to take back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.codecs.chunk_quant import Tokenwise
from kvjax.cache.codecs.exact_prefix import ExactPrefix
from kvjax.cache.codecs.group_quant import Kivi
from kvjax.cache.codecs.low_rank import PromptLowRank
from kvjax.cache.codecs.per_token import PerTokenCodec
from kvjax.cache.codecs.plain import Host, Plain, in_window
from kvjax.cache.storage import encode_prompt, observed_queries
from kvjax.core import memory
from kvjax.core.attention_mass import Observation
from kvjax.methods.bfp import SortedChannels
from kvjax.methods.cskv import ExactWindow
from kvjax.methods.mikv import ChannelBalancer
from kvjax.methods.rotatekv import CrossHeadRotation

BY_TOKEN, GROUPS = PerTokenCodec(), Kivi(4, 4, residual=4)


@pytest.mark.parametrize("wrap", [Host, ExactPrefix, lambda codec: Host(ExactPrefix(codec, 2))])
def test_a_prompts_queries_reach_a_codec_behind_others(wrap):
    rng = np.random.default_rng(0)
    x, q = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 2, 6, 8), (2, 2, 3, 6, 8)))
    pos = jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32), (2, 6))
    codec = wrap(ChannelBalancer(Plain()))
    assert observed_queries(codec) is None and observed_queries(wrap(Plain())) == 0

    @jax.jit
    def run(x, q):
        return codec.decode(memory.load(encode_prompt(codec, x, pos[:, None], Observation(q, pos))))

    np.testing.assert_allclose(run(x, q), x, rtol=1e-5)


def test_a_window_holds_single_tokens():
    by_itself = (Plain(), BY_TOKEN, PromptLowRank(0), SortedChannels(BY_TOKEN), CrossHeadRotation(BY_TOKEN))
    for codec in by_itself:
        assert in_window(codec, BY_TOKEN) == codec
        assert in_window(ExactPrefix(codec, 2), BY_TOKEN) == codec  # the first tokens leave the window
    for codec in (GROUPS, Tokenwise(4, 8), SortedChannels(GROUPS), ExactWindow(Plain(), 4)):
        assert in_window(codec, BY_TOKEN) == in_window(ExactPrefix(codec, 2), BY_TOKEN) == BY_TOKEN
    assert in_window(Host(GROUPS), BY_TOKEN) == Host(BY_TOKEN)


def test_codecs_that_code_tokens_together_evict_none_and_lie_in_no_pages_of_heads():
    for codec in (Tokenwise(4, 8), ExactWindow(Plain(), 4), ExactPrefix(GROUPS, 2), SortedChannels(GROUPS)):
        assert codec.sequential_writes and not codec.supports_eviction and codec.in_pages(4) is None
    for codec in (PromptLowRank(0), CrossHeadRotation(BY_TOKEN)):  # all heads write a slot together
        assert not codec.sequential_writes and not codec.supports_eviction and codec.in_pages(4) is None
    assert PromptLowRank().supports_eviction and PromptLowRank().in_pages(4) is None
    assert SortedChannels(BY_TOKEN).in_pages(4) == SortedChannels(BY_TOKEN)


def test_a_wrapper_with_a_window_of_its_own_takes_no_token_back():
    x, pos, n = jnp.ones((1, 1, 8, 4)), jnp.arange(8, dtype=jnp.int32)[None, None], jnp.full(1, 8, jnp.int32)
    for codec, committed in ((ExactWindow(Plain(), 4), 8), (ExactPrefix(Plain(), 2), 0), (ExactPrefix(GROUPS, 2), 8)):
        assert codec.num_committed(codec.encode(x, pos), n).tolist() == [committed]
