"""The explorer's page: one HTML file that loads nothing, and in which no text of a file or tokenizer is code."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.explore import token_codes
from kvjax.explore.exploration import Exploration, MethodTrace
from kvjax.explore.token_texts import CONTEXT_TOKENS, token_texts
from kvjax.models.tokenizer import Tokenizer

WEB = Path(__file__).parent / "web"
SCRIPTS = ("data.js", "words.js", "side.js", "main.js")  # in this order: each uses those before it
NOTES = (
    "The text was read once under each method. Then the answer of the exact cache was fed to each of them token by "
    "token. A step is one token of the answer; the page also gives the answer that the method would have written by "
    "itself.",
    "The attention is exact: the softmax of the step's query over the keys of all tokens so far, both of the exact "
    "cache, in the mean over the query heads of a key/value head. Attention to tokens that a method no longer holds "
    "is lost to it.",
    "Nothing is said by the name of a method. A token counts as held exactly if the key and the value that a query "
    "reads are the exact ones, and as on the host if they change as soon as host memory is blank. The error is the "
    "length of the difference over the vector's own length.",
    "A token is shown as the step's query found it, after everything that a codec does before a read. A token that a "
    "policy evicts in a step still counts in this step.",
    "A token that is held need not be read: the page does not show which of the held tokens a reader chooses at a "
    "step.",
    "Tokens stand for others if the method chose them for it, or folded others into them, when the text ended.",
)
READER_STATE_NOTE = (
    "A reader's own tokens outside the cache's slots are not shown: copies of recent tokens or in few bits, and its "
    "index of tokens. That concerns {}."
)


def render(exploration: Exploration, tokenizer: Tokenizer | None, source: str) -> str:
    """Renders the page of an exploration; `source` is the name of the text."""
    names = ("page.html", "page.css", *SCRIPTS)
    template, style, *scripts = ((WEB / name).read_text(encoding="utf-8") for name in names)
    script = "\n".join(scripts)
    digests = [hashlib.sha256(text.encode()).digest() for text in (script, style)]
    script_hash, style_hash = (base64.b64encode(digest).decode() for digest in digests)
    data = json.dumps(page_data(exploration, tokenizer, source), separators=(",", ":"))
    values = {
        # Only this script and this style run: no text of a file can add code.
        "policy": f"default-src 'none'; script-src 'sha256-{script_hash}'; style-src 'sha256-{style_hash}'; "
        "base-uri 'none'",
        "title": html.escape(f"kvjax · {source} under {len(exploration.methods)} methods"),
        "style": style,
        "script": script,
        # Texts inside a script element can then neither end nor begin an element.
        "data": data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"),
    }
    # One pass over the template: inserted text is not searched again, so that none can name a place.
    return re.sub(r"@@(\w+)@@", lambda place: values[place[1]], template)


def page_data(exploration: Exploration, tokenizer: Tokenizer | None, source: str) -> dict[str, Any]:
    """Returns the data that the scripts read; `data.js` describes them."""
    layers, heads, steps, _ = exploration.attention.shape
    with_reader_state = ", ".join(m.name for m in exploration.methods if m.has_reader_state)
    return {
        "about": f"{source}, {len(exploration.prompt):,} tokens, and an answer of {steps}, read by "
        f"{exploration.model}: {layers} layers of {heads} key/value heads, each for {exploration.groups} query heads.",
        "notes": [*NOTES, *([READER_STATE_NOTE.format(with_reader_state)] if with_reader_state else [])],
        "tokens": token_texts(tokenizer, [*exploration.prompt, *exploration.answer]),
        "prompt": len(exploration.prompt),
        "steps": steps,
        "layers": layers,
        "heads": heads,
        "first": first_view(exploration),
        "least": token_codes.LEAST_LOG2,
        "per_level": token_codes.STEP_LOG2,
        "likeliest": _next_texts(exploration, exploration.likeliest, tokenizer),
        # The fourth root leaves small weights visible in a byte. A page unpacks only the layers that it shows.
        "attention": [_pack(np.round(255 * np.sqrt(np.sqrt(x))).astype(np.uint8)) for x in exploration.attention],
        "methods": [_method_data(m, exploration, tokenizer) for m in exploration.methods],
    }


def first_view(exploration: Exploration) -> dict[str, Any]:
    """Returns the first view: two methods, and the layer and head in which they lose the most attention."""
    names = [m.name for m in exploration.methods]
    start = 1 if names[0] == "full" and len(names) > 2 else 0
    sides = list(range(len(names)))[start : start + 2]
    lost = np.sum([exploration.methods[i].lost_attention.mean(2) for i in sides], 0)
    layer, head = np.unravel_index(lost.argmax(), lost.shape)
    return {"sides": sides, "layer": int(layer), "head": int(head)}


def _next_texts(exploration: Exploration, likeliest: Sequence[int], tokenizer: Tokenizer | None) -> list[str]:
    """The texts that the likeliest token of each step would add to the text so far."""
    ids = [*exploration.prompt, *exploration.answer]
    ends = range(len(exploration.prompt) + 1, len(ids) + 1)
    before = (ids[max(0, end - CONTEXT_TOKENS) : end] for end in ends)
    return [token_texts(tokenizer, [*context, token])[-1] for context, token in zip(before, likeliest, strict=True)]


def _method_data(m: MethodTrace, exploration: Exploration, tokenizer: Tokenizer | None) -> dict[str, Any]:
    def describe_size(num_bytes: int, fraction: float) -> str:
        words = f"{num_bytes / 1024:,.0f} KiB, {fraction:.0%} of the exact {m.bytes.dtype} cache"
        return words if num_bytes else ""

    # The prompt stands before, since a tokenizer may write the first token of a text in another way.
    texts, num_equal = token_texts(tokenizer, [*exploration.prompt, *m.own_answer])[len(exploration.prompt) :], 0
    while num_equal < min(len(texts), len(exploration.answer)) and (
        m.own_answer[num_equal] == exploration.answer[num_equal]
    ):
        num_equal += 1
    return {
        "name": m.name,
        "device": describe_size(m.bytes.held["device"], m.bytes.fraction_of_full),
        "on_host": describe_size(m.bytes.held["pinned_host"], m.bytes.host_fraction_of_full),
        "likeliest": _next_texts(exploration, m.likeliest, tokenizer),
        "own": ["".join(texts[:num_equal]), "".join(texts[num_equal:])],
        "lost": _pack(np.round(65535 * np.clip(m.lost_attention, 0, 1)).astype("<u2")),
        "held": [_pack(layer) for layer in m.status_codes],
        "off": [_pack(layer) for layer in m.error_codes],
    }


def _pack(x: np.ndarray) -> str:
    """Deflates the bytes of an array into base64; neighboring steps are alike, and so take little."""
    return base64.b64encode(zlib.compress(np.ascontiguousarray(x).tobytes(), 9)).decode()
