"""What `kvjax explore` does."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvjax.errors import KvjaxError
from kvjax.eval.page import safe_write
from kvjax.explore import page
from kvjax.explore.record import explored
from kvjax.generation.inputs import token_ids
from kvjax.methods.strings import resolve
from kvjax.models.model import Model, load
from kvjax.utils.files import read_text_file

METHODS = "full; snapkv:budget=64; kivi:bits=2,residual=32; streaming_llm:recent=60"
MOST = 4096  # tokens of a text: beyond, a page is too large to open


def run(args: argparse.Namespace) -> None:
    """Writes the page, and says how large it is; raises KvjaxError before anything runs if it can."""
    methods = resolve(METHODS if args.methods is None else args.methods)
    for name in ("steps", "tokens"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise KvjaxError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.out.is_dir():
        raise KvjaxError(f"--out {args.out} is a folder; name the page's file")
    safe_write.spare(args.text, "--text", args.out)
    text = _read(args.text)
    model = load(args.model, dtype=args.dtype)
    ids = _ids(model, text, args)
    found = explored(model, ids, list(methods), args.steps, _say)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    size = safe_write.write(args.out, page.render(found, model.tokenizer, args.text.name)).stat().st_size
    counted = f"{len(ids)} tokens, {len(found.answer)} steps, {len(methods)} methods"
    print(f"wrote {args.out}, {size / 1e6:.1f} MB: {counted}")


def _read(file: Path) -> str:
    text = read_text_file(file, "--text")
    if not text.strip():
        raise KvjaxError(f"--text {file} has no text; give a file with some")
    return text


def _ids(model: Model, text: str, args: argparse.Namespace) -> list[int]:
    if args.chat and args.tokens is not None:
        raise KvjaxError("--tokens would cut the end of a conversation off; give --text a shorter message instead")
    messages = [{"role": "user", "content": text}]
    (ids,) = model.chat_ids(messages) if args.chat else token_ids(model, [text])
    ids = ids[: args.tokens]
    if len(ids) > MOST:
        raise KvjaxError(f"{args.text} has {len(ids)} tokens, and a page shows at most {MOST}; use --tokens {MOST}")
    return ids


def _say(method: str) -> None:
    print(f"kvjax: reading under {method}", file=sys.stderr)
