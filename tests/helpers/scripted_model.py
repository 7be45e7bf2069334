"""A model that answers any prompt that ends in "!" by one given text, to the token."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models.model import Model
from kvjax.models.tokenizer import Tokenizer
from kvjax.testing import toy_model
from tests.helpers.tokenizer_files import byte_level

SPECIAL = ("<|im_end|>", "<|call|>")


def special_tokenizer() -> Tokenizer:
    """Bytes, "<s>" before a text, "</s>", and SPECIAL."""
    inner = byte_level().inner
    inner.add_special_tokens(list(SPECIAL))
    return Tokenizer(inner)


def scripted_model(script: str, eos: tuple[str, ...] = ()) -> Model:
    """Makes the model; its last token follows itself.

    Args:
      script: the answer, in which special tokens are spelled and no token stands twice.
      eos: tokens that end an answer.
    """
    tokenizer = special_tokenizer()
    ids = tokenizer.encode("!" + script, special_tokens=False)
    assert len(set(ids)) == len(ids), "each token has one successor"
    model = toy_model(vocab_size=tokenizer.vocab_size, layers=1, eos_ids=tuple(map(tokenizer.token_id, eos)))
    # Attention and the MLP add nothing, so that a token's embedding alone decides on the next.
    params = jax.tree.map(jnp.zeros_like, model.params) | {"final_norm": model.params["final_norm"]}
    embedding = np.random.default_rng(0).normal(size=(tokenizer.vocab_size, model.config.width)).astype(np.float32)
    embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)
    head = np.zeros_like(embedding.T)
    for token, following in zip(ids, [*ids[1:], ids[-1]], strict=True):
        head[:, following] += embedding[token]
    params |= {"embedding": jnp.asarray(embedding), "head": {"kernel": jnp.asarray(head)}}
    return dataclasses.replace(model, params=params, tokenizer=tokenizer, name="scripted")
