"""Tiny models with kvjax's weights, the answers of kvjax's decoder, and a tokenizer that the packages accept."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from kvjax import functional
from kvjax.core.attention import Rule
from kvjax.core.rope import Rope
from kvjax.models import decoder
from kvjax.models.config import Config
from kvjax.models.kinds import AttentionKind, LayerKind, MlpKind

METHODS = (
    "full",
    "snapkv:budget=40",
    "snapkv:budget=40 + adakv",
    "snapkv:budget=40 + criticalkv",  # reads the output projection
    "kivi:bits=4,group=8,residual=8",
    "h2o:heavy=8,recent=8",
    "streaming_llm:sinks=2,recent=14",
    "kvzip:budget=40",  # has the model repeat the prompt
    "quest:budget=16,page=4",
    "cake:budget=40",  # compresses after all layers
    "minicache",  # pairs of layers
    "tova:budget=16",
    "int8",
)
VOCABULARY = 64
LENGTHS = np.array([60, 41])
CACHE = 96
STEPS = 8


@functools.cache
def llama() -> tuple[Config, dict]:
    """Llama, with RoPE's theta as google-tunix has it."""
    attention = AttentionKind(heads=4, kv_heads=2, head_dim=16, rope=Rope(16, 1e6))
    kind = LayerKind(attention, MlpKind(48))
    config = Config(VOCABULARY, 64, (kind,), (0,) * 4, max_positions=1024, norm_eps=1e-5, tie_embeddings=False)
    return config, weights(config)


@functools.cache
def gemma3() -> tuple[Config, dict]:
    """Gemma 3 with a window of 16 in five of six layers."""
    mlp = MlpKind(48, activation="gelu_tanh")
    kinds = tuple(
        LayerKind(
            AttentionKind(
                heads=4, kv_heads=2, head_dim=16, rope=Rope(16, theta), rule=Rule(window), qk_norm="head", scale=0.25
            ),
            mlp,
            norms="both",
            unit_offset=True,
        )
        for window, theta in ((16, 1e4), (None, 1e6))
    )
    config = Config(
        VOCABULARY,
        64,
        kinds,
        (0, 0, 0, 0, 0, 1),
        max_positions=1024,
        norm_eps=1e-6,
        tie_embeddings=True,
        embed_scale=8.0,
    )
    return config, weights(config)


def weights(config: Config) -> dict:
    """Random weights with loud queries and norms that are not 1: quiet ones would make every method look exact.

    Norms behind a layer are louder than the embedding: else a model with tied embeddings repeats its last token.
    """
    params = jax.tree.map(np.asarray, nn.unbox(decoder.init(config, jax.random.key(0))))
    rng = np.random.default_rng(0)

    def change(path, x):
        name = jax.tree_util.keystr(path)
        if "scale" in name:
            return (x + rng.normal(4 if "post_norm" in name else 0, 0.2, x.shape)).astype(np.float32)
        return x * np.float32(3) if "'q'" in name else x

    return jax.tree_util.tree_map_with_path(change, params)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    # tunix' sampler puts the id of the beginning of a text before a prompt that has none.
    return [[2, *rng.integers(4, VOCABULARY, n - 1).tolist()] for n in LENGTHS]


@functools.cache
def expected(family: str, method: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B n] that kvjax's own decoder predicts greedily, and the logits [B n V] that it chose them by."""
    config, params = {"llama": llama, "gemma3": gemma3}[family]()
    plan = functional.bind(method, config)
    width = LENGTHS.max()
    padded = np.stack([np.r_[p, np.zeros(width - len(p), int)] for p in prompts()]).astype(np.int32)
    logits, cache = functional.prefill(params, padded, jnp.asarray(LENGTHS, jnp.int32), plan, config, CACHE)
    rows = [np.asarray(logits)]
    for _ in range(STEPS - 1):
        token = rows[-1].argmax(-1).astype(np.int32)
        logits, cache = functional.extend(params, token[:, None], cache)
        rows.append(np.asarray(logits)[:, 0])
    logits = np.stack(rows, 1)
    return logits.argmax(-1), logits


class Tokenizer:
    """Ids as text: "5 17 8"."""

    VERSION = 0
    FORBIDDEN_TOKENS = ()

    def __init__(self, special_tokens=None):
        self.special_tokens = special_tokens

    def pad_id(self):
        return 0

    def bos_id(self):
        return 2

    def eos_id(self):
        return 1

    def encode(self, text, add_bos=False, **options):
        return [int(word) for word in text.split()]

    def decode(self, ids, **options):
        return " ".join(str(int(i)) for i in np.atleast_1d(ids) if i)


def texts() -> list[str]:
    return [" ".join(map(str, p)) for p in prompts()]
