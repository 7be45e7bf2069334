"""A cache goes on under the weights that filled it alone; a cache that names none is refused."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import cachegen, functional
from kvjax.errors import KvjaxError, OtherWeights
from kvjax.generation import archive, save
from kvjax.models.tokenizer import Tokenizer
from kvjax.testbed import vocab
from kvjax.testing import toy_model

DOCUMENTS, MORE = [[1, 2, 3, 4], [5, 6, 7]], [[8, 9], [10]]


@functools.cache
def make_model() -> kvjax.Model:
    return dataclasses.replace(toy_model(layers=2, vocab_size=512), tokenizer=Tokenizer(vocab.tokenizer()))


def fine_tuned() -> kvjax.Model:
    """A model that was trained further: its first rows are those of the other."""
    embedding = make_model().params["embedding"].at[5:].multiply(1.5)
    return dataclasses.replace(make_model(), params={**make_model().params, "embedding": embedding})


CALLS = {
    "extend": lambda model, cache: kvjax.extend(model, MORE, cache),
    "generate": lambda model, cache: kvjax.generate(model, MORE, cache=cache, max_new_tokens=2),
    "stream": lambda model, cache: next(kvjax.stream(model, MORE, cache=cache, max_new_tokens=2)),
    "stream_text": lambda model, cache: next(
        kvjax.stream_text(model, MORE[0], cache=kvjax.cache_ops.take(cache, [0]), max_new_tokens=2)
    ),
    "edit": lambda model, cache: kvjax.cache_ops.edit(model, cache, 1, 2, MORE),
    "edit that deletes": lambda model, cache: kvjax.cache_ops.edit(model, cache, 1, 2, [[], []]),
}

CONTEXT_CALLS = {
    "ask": lambda c: c.ask(MORE, max_new_tokens=2),
    "feed": lambda c: c.feed(MORE),
    "generate": lambda c: c.generate(max_new_tokens=2),
    "generate in its own cache": lambda c: c.generate(max_new_tokens=2, donate=True),
    "stream": lambda c: next(c.stream(max_new_tokens=2)),
    "score": lambda c: c.score(MORE),
    "score of one token": lambda c: c.score([[3], [4]]),
    "edit": lambda c: c.edit(0, 1, MORE),
    "after a crop": lambda c: c.crop(2).ask(MORE, max_new_tokens=2),
    "after a fork": lambda c: c.take([1, 0]).feed(MORE),
    "extend_prefix": lambda c: c.extend_prefix(MORE, of=[0, 1]),
    "full_kv": lambda c: cachegen.write("/nonexistent/file", c),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_model_that_was_trained_further_cannot_go_on_from_a_cache(name):
    cache = kvjax.prefill(make_model(), DOCUMENTS, "full")[1]
    CALLS[name](make_model(), cache)
    with pytest.raises(OtherWeights, match="equal configuration and other weights; prefill the prompt with this one"):
        CALLS[name](fine_tuned(), cache)


@pytest.mark.parametrize("name", CONTEXT_CALLS)
def test_a_context_cannot_be_given_another_model(name, tmp_path):
    context = dataclasses.replace(kvjax.read(make_model(), DOCUMENTS, "full", headroom=32), model=fine_tuned())
    with pytest.raises(OtherWeights, match="equal configuration and other weights"):
        CONTEXT_CALLS[name](context)
    with pytest.raises(OtherWeights):
        context.save(tmp_path / "context")
    assert not list(tmp_path.iterdir())


def test_a_model_whose_parameters_were_changed_in_place_cannot_go_on():
    model = dataclasses.replace(make_model(), params=dict(make_model().params))
    context = kvjax.read(model, DOCUMENTS, "full", headroom=32)
    context.ask(MORE, max_new_tokens=2)
    model.params["embedding"] = fine_tuned().params["embedding"]
    with pytest.raises(OtherWeights):
        context.ask(MORE, max_new_tokens=2)


def functional_cache():
    tokens, lengths = jnp.asarray([[1, 2, 3, 4], [5, 6, 7, 0]]), jnp.asarray([4, 3])
    plan = functional.bind("full", make_model().config)
    return functional.prefill(make_model().params, tokens, lengths, plan, make_model().config, 64)[1]


@pytest.mark.parametrize("name", CALLS)
def test_a_cache_of_the_functional_core_is_taken_once_its_weights_are_said(name):
    cache = functional_cache()
    with pytest.raises(OtherWeights, match=r"dataclasses.replace\(cache, weights=model.fingerprint\)"):
        CALLS[name](make_model(), cache)
    CALLS[name](make_model(), dataclasses.replace(cache, weights=make_model().fingerprint))


def test_the_functional_core_keeps_the_name_of_the_weights():
    cache = kvjax.prefill(make_model(), DOCUMENTS, "full")[1]
    longer = functional.extend(make_model().params, jnp.asarray([[3], [4]]), cache)[1]
    logits = kvjax.extend(make_model(), MORE, longer)[0]
    expected = kvjax.logits(make_model(), [[*DOCUMENTS[0], 3, *MORE[0]]])[0, -1]
    np.testing.assert_allclose(logits[0, 1], expected, atol=1e-5)


def test_caches_of_unlike_weights_are_not_joined():
    cache = kvjax.prefill(make_model(), DOCUMENTS, "full", capacity=64)[1]
    for other in (kvjax.prefill(fine_tuned(), DOCUMENTS, "full", capacity=64)[1], functional_cache()):
        for pair in ([cache, other], [other, cache]):
            with pytest.raises(OtherWeights, match="join those of one model"):
                kvjax.cache_ops.join(pair)
    assert not kvjax.cache_ops.join([functional_cache()] * 2).weights
    context = kvjax.read(make_model(), DOCUMENTS, "full")
    with pytest.raises(OtherWeights, match="other weights.*join those of one model"):
        context.join(kvjax.read(fine_tuned(), DOCUMENTS, "full"))


def test_exact_keys_and_values_belong_to_the_weights_that_made_them(tmp_path):
    exact = kvjax.reuse.read_exactly(make_model(), DOCUMENTS)
    moved = dataclasses.replace(exact, model=fine_tuned())
    calls = [
        lambda x: x.compress("full", 64),
        lambda x: kvjax.reuse.blend(x, [[0, 1]], [[3]]),
        lambda x: kvjax.reuse.cut(x, [[2], [2]]),
        lambda x: kvjax.cachegen.write(tmp_path / "file", x),
    ]
    for call in calls:
        call(exact)
        with pytest.raises(OtherWeights, match="keys and values are of a model with other weights"):
            call(moved)


def test_files_of_another_model_or_of_earlier_fingerprints_are_refused(tmp_path, monkeypatch):
    context = kvjax.read(make_model(), DOCUMENTS, "full", headroom=32)
    paths = [context.save(tmp_path / "context"), kvjax.cachegen.write(tmp_path / "few", context)]
    for path, read in zip(paths, (kvjax.resume, kvjax.cachegen.read), strict=True):
        read(make_model(), path)
        with pytest.raises(OtherWeights, match="saved with a model of other weights"):
            read(fine_tuned(), path)
    monkeypatch.setattr(save, "FORMAT", save.FORMAT._replace(version=2))
    old = context.save(tmp_path / "old")
    monkeypatch.undo()
    with pytest.raises(KvjaxError, match="version 2, and this kvjax reads version 3 .*; read the documents again"):
        kvjax.resume(make_model(), old)


def test_a_file_without_a_fingerprint_is_refused(tmp_path):
    path = kvjax.read(make_model(), DOCUMENTS, "full", headroom=32).save(tmp_path / "context")
    with np.load(path) as file:
        arrays = dict(file)
    header = json.loads(arrays[archive.HEADER].tobytes())
    del header["weights"]
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        np.savez(file, **arrays | {archive.HEADER: np.frombuffer(text, np.uint8)})
    with pytest.raises(KvjaxError, match="damaged one"):
        kvjax.resume(make_model(), path)
