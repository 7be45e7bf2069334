"""Bytes of the cache after each turn of a long conversation with Gemma 3 in google-deepmind's `gemma`, under a method.

    make adapters
    .venv-adapters/bin/python -m experiments.gemma_chat --model FOLDER

FOLDER is a converted Gemma 3 270M (`kvjax models`). The user's turns are paragraphs of this repository's pages. The
package's own sampler stops at its `cache_length`, 4,096 tokens. `full_bytes` is the size of an exact cache of the whole
conversation.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
from rich.table import Table

import kvjax
from experiments.bench import measuring
from tests.adapters import absent_packages

METHOD = "streaming_llm:sinks=4,recent=1020"


def gemma_params(params: Any, config: Any) -> Any:
    """Renames kvjax's parameters of a Gemma 3 to those of `gm.nn`."""

    def layer(p: Any) -> Any:
        a, mlp = p["attention"], p["mlp"]
        q, k, v, o = (np.asarray(a[name]["kernel"]) for name in ("q", "k", "v", "o"))
        gate, up = (np.asarray(mlp[name]["kernel"]) for name in ("gate", "up"))
        return {
            "pre_attention_norm": p["attention_norm"],
            "post_attention_norm": p["attention_post_norm"],
            "pre_ffw_norm": p["mlp_norm"],
            "post_ffw_norm": p["mlp_post_norm"],
            "attn": {
                "q_einsum": {"w": q.reshape(q.shape[0], -1, q.shape[3]).transpose(1, 0, 2)},  # N D H
                "kv_einsum": {"w": np.stack([k, v]).transpose(0, 2, 1, 3)},  # 2 K D H
                "attn_vec_einsum": {"w": o.reshape(-1, *o.shape[2:])},  # N H D
                "_query_norm": a["q_norm"],
                "_key_norm": a["k_norm"],
            },
            "mlp": {"gating_einsum": np.stack([gate.T, up.T]), "linear": mlp["down"]["kernel"]},  # 2 F D and F D
        }

    layers = {f"layer_{i}": layer(params[f"layer_{i}"]) for i in range(config.layers)}
    own = {"embedder": {"input_embedding": params["embedding"]}, "final_norm": params["final_norm"]}
    return jax.tree.map(jax.numpy.asarray, {**own, **layers})


class Tokenizer:
    """The tokenizer of a converted checkpoint, as `gm.text` asks for one; the package's own lies in a Google bucket."""

    VERSION = 0
    FORBIDDEN_TOKENS = ()

    def __init__(self, tokenizer: Any, special_tokens: Any):
        self.tokenizer, self.special_tokens = tokenizer, special_tokens

    def encode(self, text: str, *, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        ids = self.tokenizer.inner.encode(text, add_special_tokens=False).ids
        return [int(self.special_tokens.BOS)] * add_bos + ids + [int(self.special_tokens.EOS)] * add_eos

    def decode(self, ids: Any) -> str:
        return self.tokenizer.inner.decode([int(i) for i in np.atleast_1d(ids) if i], skip_special_tokens=False)


def paragraphs(num_characters: int) -> Iterator[str]:
    """Cuts the repository's pages into texts of about this length, again from the start when they end."""
    folder = Path(kvjax.__file__).parents[1]
    text = "\n".join(path.read_text() for path in sorted((folder / "docs").glob("*.md")))
    return itertools.cycle(text[i : i + num_characters] for i in range(0, len(text) - num_characters, num_characters))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a converted Gemma 3")
    parser.add_argument("--method", default=METHOD)
    parser.add_argument("--tokens", type=int, default=20_000, help="of the conversation")
    parser.add_argument("--characters", type=int, default=4_000, help="of each user's turn")
    parser.add_argument("--answer", type=int, default=8, help="tokens of each answer at most")
    args = parser.parse_args(argv)
    absent_packages.install()
    before = measuring.machine()
    from kvjax.adapters.gemma import ChatSampler, gm, layer_specs

    own = kvjax.load(args.model)
    model = gm.nn.Gemma3_270M(tokens="batch.tokens", dtype=jax.numpy.float32)
    params = gemma_params(own.params, own.config)
    tokenizer = Tokenizer(own.tokenizer, gm.text.Gemma3Tokenizer.special_tokens)
    del own
    sampler = ChatSampler(
        model=model, params=params, tokenizer=tokenizer, multi_turn=True, max_out_length=args.answer, method=args.method
    )
    per_token = sum(2 * s.num_kv_heads * s.head_dim * 4 for s in layer_specs(model))
    rows: list[dict[str, Any]] = []
    length = 0
    for text in paragraphs(args.characters):
        start = time.perf_counter()
        answer = sampler.chat(f"Tell me in one sentence what this is about:\n{text}", max_new_tokens=args.answer)
        cache = sampler.last_state.cache
        length = int(cache[0].length[0])
        rows.append(
            {
                "turn": len(rows) + 1,
                "tokens": length,
                "cache_bytes": sum(x.nbytes for x in jax.tree.leaves(cache)),
                "full_bytes": length * per_token,
                "live_bytes": sum(x.nbytes for x in jax.live_arrays()),
                "resident_bytes": psutil.Process().memory_info().rss,
                "seconds": round(time.perf_counter() - start, 1),
                "answer": answer,
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        if length >= args.tokens:
            break
    table = Table(title=f"Gemma 3 270M in gemma's own model under {args.method}, float32")
    for name in ("turn", "tokens", "cache_bytes", "full_bytes", "resident_bytes"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{row[column.header]:,}" for column in table.columns))
    measuring.report("gemma_chat", before, [table], [], {"method": args.method, "turns": rows})


if __name__ == "__main__":
    main()
