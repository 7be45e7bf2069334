"""A record that no model made, of a text that would like to be code, and pages of it."""

from __future__ import annotations

import numpy as np

from kvjax.cache.accounting import CacheBytes
from kvjax.explore import token_codes
from kvjax.explore.exploration import Exploration, MethodTrace

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "<img src=x onerror=alert(2)>",
    "\u2028\u2029",
    "\"'`${alert(3)}",
    "@@data@@",
    "]]>&lt;&amp;",
    "\x00\ufffd",
    "",
    "\n",
)


class Words:
    """A tokenizer whose token i is a word of its own."""

    def __init__(self, words: tuple[str, ...] = HOSTILE):
        self.words = words

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.words[i % len(self.words)] for i in ids)


def make_exploration(
    prompt: int = 30, steps: int = 4, layers: int = 2, heads: int = 3, methods: tuple[str, ...] = ("full", "a<b>", "c")
) -> Exploration:
    """Tokens leave by chance, and attention is drawn: only shapes and sizes are like those of a model."""
    rng, P = np.random.default_rng(0), prompt + steps
    now = np.arange(prompt, P)[None, None, :, None]
    is_visible = np.arange(P) <= now
    attention = np.where(is_visible, np.exp(2.5 * rng.normal(size=(layers, heads, steps, P))), 0)
    attention = (attention / attention.sum(-1, keepdims=True)).astype(np.float32)
    traces = [method_trace(name, i, attention, prompt) for i, name in enumerate(methods)]
    text = list(range(prompt))
    return Exploration("a <b>model</b>", 2, text, list(range(steps)), list(range(1, steps + 1)), attention, traces)


def method_trace(name: str, number: int, attention: np.ndarray, prompt: int) -> MethodTrace:
    """A method that keeps every `number + 1`-th token: the second on the host, the third in few bits."""
    layers, heads, steps, P = attention.shape
    at, now = np.arange(P), np.arange(prompt, P)[:, None]
    is_kept = (at % (number + 1) == 0) | (at >= now - 3)
    status_codes = np.where(is_kept & (at <= now), token_codes.HELD, 0).astype(np.uint8)
    status_codes |= np.where(
        status_codes > 0, (0, token_codes.KEY_HOST | token_codes.VALUE_HOST, token_codes.REPRESENTS)[number % 3], 0
    ).astype(np.uint8)
    status_codes[0] |= np.where((status_codes[0] > 0) & (status_codes[1] == 0), token_codes.LEAVES, 0).astype(np.uint8)
    status_codes = np.broadcast_to(status_codes, attention.shape).copy()
    error_codes = np.where((status_codes > 0) & (at < prompt - 5), (0, 0, 5 * 16 + 7)[number % 3], 0).astype(np.uint8)
    lost_attention = np.where(status_codes & token_codes.HELD, 0, attention).sum(-1).astype(np.float32)
    own_answer = list(range(2, steps + 2))
    size = CacheBytes(
        {"device": 10240, "pinned_host": 2048 * number}, {"device": 512, "pinned_host": 0}, 20480, "bfloat16"
    )
    return MethodTrace(name, status_codes, error_codes, lost_attention, own_answer, [0, 2, 2], size, number == 1)
