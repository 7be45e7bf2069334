"""The command `kvjax explore`."""

from __future__ import annotations

import argparse
import functools
import sys

from kvjax.errors import KvjaxError
from kvjax.eval.tasks import symbols
from kvjax.eval.tasks.case import Spec
from kvjax.explore import explorer_page
from kvjax.explore.exploration import explore
from kvjax.generation.inputs import token_ids
from kvjax.models.model import load
from kvjax.registry.strings import resolve
from kvjax.utils import arguments
from kvjax.utils.files import check_output, read_text_file, write_text

METHODS = "full; snapkv:budget=64; kivi:bits=2,residual=32; streaming_llm:recent=60"
DEFAULT_CHARACTERS = 1500
MOST_TOKENS = 4096  # of a text: beyond, a page is too large to open


def run(args: argparse.Namespace) -> None:
    """Writes the page, and prints its size; raises KvjaxError before anything runs if it can."""
    methods = resolve(METHODS if args.methods is None else args.methods)
    for name in ("steps", "tokens"):
        if getattr(args, name) is not None:
            arguments.integer(f"--{name}", getattr(args, name))
    if args.text is None:
        text, name = _default_text(), "source code"
        print(f"kvjax: reading {len(text):,} characters of {name}; --text FILE takes your own", file=sys.stderr)
    else:
        text, name = read_text_file(args.text, "--text"), args.text.name
        if not text.strip():
            raise KvjaxError(f"--text {args.text} has no text; give a file with some")
    check_output(args.out, args.text, "--text")
    model = load(args.model, dtype=args.dtype, weights=args.weights)
    if args.chat and args.tokens is not None:
        raise KvjaxError("--tokens would cut the end of a conversation off; give --text a shorter message instead")
    (ids,) = model.chat_ids([{"role": "user", "content": text}]) if args.chat else token_ids(model, [text], begins=True)
    ids = ids[: args.tokens]
    if len(ids) > MOST_TOKENS:
        raise KvjaxError(
            f"{name} has {len(ids)} tokens, and a page shows at most {MOST_TOKENS}; use --tokens {MOST_TOKENS}"
        )
    say = functools.partial(print, "kvjax: reading under", file=sys.stderr)
    exploration = explore(model, ids, list(methods), args.steps, say)
    page = explorer_page.render(exploration, model.tokenizer, name)
    num_bytes = write_text(args.out, page).stat().st_size
    counts = f"{len(ids)} tokens, {len(exploration.answer)} steps, {len(methods)} methods"
    print(f"wrote {args.out}, {num_bytes / 1e6:.1f} MB: {counts}")


def _default_text() -> str:
    """The first lines of the source code that no shipped model was trained on."""
    text = symbols.read_source(Spec())[:DEFAULT_CHARACTERS]
    return text[: text.rfind("\n") + 1]
