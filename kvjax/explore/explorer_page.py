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
from kvjax.explore.exploration import Explored, Watching
from kvjax.explore.token_texts import pieces
from kvjax.models.tokenizer import Tokenizer

WEB = Path(__file__).parent / "web"
SCRIPTS = ("data.js", "words.js", "side.js", "main.js")  # in this order: each uses those before it
NOTES = (
    "The text was read once under each method. Then the answer of the exact cache was fed to each of them token by "
    "token. A step is one token of the answer; what a method would have written by itself is said beside.",
    "The attention is exact: the softmax of the step's query over the keys of all tokens so far, both of the exact "
    "cache, in the mean over the query heads of a key/value head. What falls on tokens that a method no longer holds "
    "is lost to it.",
    "Nothing is said by the name of a method. A token counts as held exactly when the key and the value that a query "
    "reads are those that came; as on the host when they change as soon as host memory is blank. How far they are off "
    "is the length of the difference over the row's own length.",
    "A token is shown as the step's query found it, after what a codec does before it is read. One that a policy "
    "evicts in a step still counts in this step.",
    "What is held need not be read: which tokens a reader chooses among those held, at a step, is not shown.",
    "Tokens that stand for others are those that the method chose for it, or folded others into, when the text ended.",
)
ASIDE = (
    "What a reader keeps beside the cache's slots is not shown: copies of recent tokens or in few bits, and what "
    "tokens are looked up by. That concerns {}."
)


def render(found: Explored, tokenizer: Tokenizer | None, source: str) -> str:
    """The page of a record; source: what the text is called."""
    style, script = _read("page.css"), "\n".join(map(_read, SCRIPTS))
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'"
    values = {
        "policy": policy,
        "title": html.escape(f"kvjax · {source} under {len(found.methods)} methods"),
        "style": style,
        "script": script,
        "data": embedded(data(found, tokenizer, source)),
    }
    # What is put in is not looked through again, so that no text can name a place.
    return re.sub(r"@@(\w+)@@", lambda place: values[place[1]], _read("page.html"))


def embedded(value: Any) -> str:
    """JSON that may stand inside a script element, whatever texts it has: it ends no element and begins none."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def data(found: Explored, tokenizer: Tokenizer | None, source: str) -> dict[str, Any]:
    """What the scripts read, as `data.js` says."""
    layers, heads, steps, _ = found.attention.shape
    texts = pieces(tokenizer, [*found.prompt, *found.answer])
    aside = ", ".join(m.name for m in found.methods if m.aside)
    return {
        "about": f"{source}, {len(found.prompt):,} tokens, and an answer of {steps}, read by {found.model}: {layers} "
        f"layers of {heads} key/value heads, each for {found.groups} query heads.",
        "notes": [*NOTES, *([ASIDE.format(aside)] if aside else [])],
        "tokens": texts,
        "prompt": len(found.prompt),
        "steps": steps,
        "layers": layers,
        "heads": heads,
        "first": first(found),
        "least": token_codes.LEAST,
        "per_level": token_codes.STEP,
        "likeliest": _next(found, found.likeliest, tokenizer),
        "attention": packed_layers(np.round(255 * np.sqrt(np.sqrt(found.attention))).astype(np.uint8)),
        "methods": [_method(m, found, tokenizer) for m in found.methods],
    }


def first(found: Explored) -> dict[str, Any]:
    """What the page shows at first: two methods, and the layer and head in which they lose the most attention."""
    names = [m.name for m in found.methods]
    start = 1 if names[0] == "full" and len(names) > 2 else 0
    sides = list(range(len(names)))[start : start + 2]
    lost = np.sum([found.methods[i].lost.mean(2) for i in sides], 0)
    layer, head = np.unravel_index(lost.argmax(), lost.shape)
    return {"sides": sides, "layer": int(layer), "head": int(head)}


def _next(found: Explored, likeliest: Sequence[int], tokenizer: Tokenizer | None) -> list[str]:
    """The tokens that would come next at each step, as pieces of the text so far."""
    read = [*found.prompt, *found.answer]
    ends = range(len(found.prompt) + 1, len(read) + 1)
    return [pieces(tokenizer, [*read[max(0, n - 8) : n], i])[-1] for n, i in zip(ends, likeliest, strict=True)]


def _method(m: Watching, found: Explored, tokenizer: Tokenizer | None) -> dict[str, Any]:
    own, alike = pieces(tokenizer, m.own), 0
    while alike < min(len(own), len(found.answer)) and m.own[alike] == found.answer[alike]:
        alike += 1
    return {
        "name": m.name,
        "device": _size(m.bytes.held["device"], m.bytes.fraction_of_full, m.bytes.dtype),
        "on_host": _size(m.bytes.held["pinned_host"], m.bytes.host_fraction_of_full, m.bytes.dtype),
        "likeliest": _next(found, m.likeliest, tokenizer),
        "own": ["".join(own[:alike]), "".join(own[alike:])],
        "lost": packed(np.round(65535 * np.clip(m.lost, 0, 1)).astype("<u2")),
        "held": packed_layers(m.held),
        "off": packed_layers(m.off),
    }


def _size(count: int, fraction: float, dtype: str) -> str:
    """Bytes, and what they are of the exact cache; nothing of none."""
    return f"{count / 1024:,.0f} KiB, {fraction:.0%} of the exact {dtype} cache" if count else ""


def packed_layers(x: np.ndarray) -> list[str]:
    """`packed`, layer by layer: a page unpacks those that are looked at."""
    return [packed(layer) for layer in x]


def packed(x: np.ndarray) -> str:
    """The bytes of an array, deflated, in base64. Steps that lie next to each other are alike, and take little."""
    return base64.b64encode(zlib.compress(np.ascontiguousarray(x).tobytes(), 9)).decode()


def _hash(text: str) -> str:
    """By which a page allows one script or style, and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _read(name: str) -> str:
    return (WEB / name).read_text(encoding="utf-8")
