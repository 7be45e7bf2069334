"""gemma's own models under methods: what the package's sampler gives, and what kvjax's own decoder gives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gemma import gm
from gemma.gm.nn import _config, _modules

from experiments.gemma_chat import gemma_params
from kvjax.adapters import gemma
from kvjax.engine import plan
from kvjax.errors import KvjaxError, KvjaxWarning
from tests.adapters import reference

TYPES = _modules.AttentionType


class TinyGemma3(gm.nn.Transformer):
    config: _config.TransformerConfig = _config.TransformerConfig(
        num_embed=reference.VOCABULARY,
        embed_dim=64,
        hidden_dim=48,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        final_logit_softcap=None,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        use_qk_norm=True,
        attention_types=(TYPES.LOCAL_SLIDING,) * 5 + (TYPES.GLOBAL,),
        sliding_window_size=16,
        transpose_gating_einsum=True,
        local_base_frequency=10_000,
        global_base_frequency=1_000_000,
    )


class SpecialTokens:
    PAD, EOS, BOS, END_OF_TURN = 0, 1, 2, 3


LOGITS = []


@dataclasses.dataclass(frozen=True)
class RecordedGreedy(gm.text.SamplingMethod):
    """The greedy choice, and the logits [B V] of each into `LOGITS`."""

    def get_next_tokens(self, logits, rng):
        jax.debug.callback(lambda x: LOGITS.append(np.asarray(x)), logits, ordered=True)
        return logits.argmax(-1)


@pytest.fixture(scope="module")
def parts():
    config, params = reference.gemma3()
    model = TinyGemma3(tokens="batch.tokens", dtype=jnp.float32)
    tokenizer = reference.Tokenizer(SpecialTokens)
    return {
        "model": model,
        "params": gemma_params(params, config),
        "tokenizer": tokenizer,
        "cache_length": reference.CACHE,
        "max_out_length": 16,
        "pad_length": (64,),
    }


# In one layer without a window there are no pairs; with those that have one, there are.
@pytest.mark.parametrize("method", [m.replace("minicache", "minicache + in_windows") for m in reference.METHODS])
def test_a_model_gives_what_kvjax_gives_for_the_same_weights(method, parts):
    tokens, logits = reference.expected("gemma3", method)
    LOGITS.clear()
    out = gemma.Sampler(**parts, method=method).sample(
        reference.texts(), max_new_tokens=reference.STEPS, sampling=RecordedGreedy(), return_state=True
    )
    jax.effects_barrier()
    for b, predicted in enumerate(np.asarray(out.tokens)):
        n = int((predicted != 0).sum())
        assert n and predicted[:n].tolist() == tokens[b, :n].tolist()
        # A number at the edge between two codes is rounded up by one and down by the other.
        limit = 0.02 if method.startswith(("int8", "kivi")) else 2e-4
        np.testing.assert_allclose([x[b] for x in LOGITS[:n]], logits[b, :n], atol=limit)


def test_layers_are_described_as_those_of_kvjax(parts):
    assert gemma.layer_specs(parts["model"]) == plan.specs(reference.gemma3()[0])


def test_full_predicts_what_the_packages_own_sampler_predicts(parts):
    own = gm.text.Sampler(**parts)
    ours = gemma.Sampler(**parts, method="full")
    for sampling in (gm.text.Greedy(), gm.text.RandomSampling()):
        options = {"max_new_tokens": 12, "sampling": sampling, "rng": 5, "return_state": True}
        want, got = (s.sample(reference.texts(), **options).tokens for s in (own, ours))
        np.testing.assert_array_equal(want, got)
    streamed = [x.text for x in ours.sample(reference.texts()[0], max_new_tokens=6, stream=True, return_state=True)]
    assert " ".join(streamed) == ours.sample(reference.texts()[0], max_new_tokens=6)


def test_a_later_turn_continues_the_conversation_as_one_text(parts):
    """Two sequences of unequal lengths: their later turn gives what the whole text gives at once."""
    sampler = gemma.Sampler(**parts, method="full")
    first, second = ["5 9 11 23 8 4 7 30 21", "6 6 40"], ["3 12 17", "50 51 52 53 54"]
    out = sampler.sample(first, max_new_tokens=4, return_state=True)
    later = sampler.sample(second, max_new_tokens=4, last_state=out.state)
    for b in range(2):
        answer = " ".join(str(int(t)) for t in out.tokens[b] if t)
        assert later[b] == sampler.sample(f"{first[b]} {answer} {second[b]}", max_new_tokens=4)


def test_a_conversation_of_constant_size_goes_on_beyond_the_cache_length(parts):
    options = {k: v for k, v in parts.items() if k != "pad_length"}
    chat = gemma.ChatSampler(**options, multi_turn=True, method="streaming_llm:sinks=2,recent=14")
    object.__setattr__(chat, "tokenizer", parts["tokenizer"])
    sizes = set()
    for _ in range(4):
        out = chat.sampler.sample(reference.texts()[1], max_new_tokens=8, return_state=True, last_state=chat.last_state)
        object.__setattr__(chat, "last_state", out.state)
        sizes.add(sum(x.nbytes for x in jax.tree.leaves(out.state.cache)))
    assert len(sizes) == 1 and int(out.state.cache[0].length[0]) > reference.CACHE

    full = gemma.Sampler(**parts, method="full")
    state = full.sample(reference.texts()[0], max_new_tokens=8, return_state=True).state
    with pytest.raises(KvjaxError, match="the cache room for 96; take a larger cache_length"):
        full.sample(reference.texts()[0], last_state=state)
    with pytest.warns(KvjaxWarning, match="the cache of 96 tokens is full"):
        gemma.Sampler(**{**parts, "max_out_length": 64}, method="full", stop_tokens=()).sample(reference.texts()[0])


def test_what_cannot_be_is_said(parts):
    with pytest.raises(KvjaxError, match="kcache has the same"):
        gemma.Sampler(**parts, method="specache")
    with pytest.raises(KvjaxError, match="minicache [+] in_windows"):
        gemma.Sampler(**parts, method="minicache")
    with pytest.raises(KvjaxError, match="images=None"):
        gemma.Sampler(**parts).sample("5 6", images=np.zeros((1, 4, 4, 3), np.uint8))
    with pytest.raises(KvjaxError, match="no gm.nn.Transformer"):
        gemma.layer_specs(gm.nn.LoRA(rank=2, model=parts["model"]))
