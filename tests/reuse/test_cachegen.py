"""CacheGen's files: a lossless coder, levels as in a second implementation of the rule, and the size of a file."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import kvjax
from kvjax import KvjaxError, cachegen
from kvjax.core import memory
from kvjax.generation import archive
from kvjax.reuse import rans
from kvjax.testing import toy_model

RNG = np.random.default_rng(0)
LENGTHS = (70, 23, 1)
KEYS, VALUES = (32, 16), (9, 256)
LEVELS = list(zip(KEYS, VALUES, strict=True))


@functools.cache
def make_model() -> kvjax.Model:
    return toy_model(layers=2)


@functools.cache
def read_texts():
    return kvjax.reuse.read_exactly(make_model(), [RNG.integers(0, 97, n).tolist() for n in LENGTHS])


def symbol_tables(symbols: np.ndarray, A: int) -> rans.Tables:
    """The distribution of each column of symbols u8[n C]."""
    counts = np.stack([np.bincount(column, minlength=A) for column in symbols.T])
    return rans.Tables(counts, np.arange(symbols.shape[1]))


def entropy(counts: np.ndarray) -> float:
    """Bits that symbols of these counts [D A] take at the least."""
    p = counts / counts.sum(1, keepdims=True)
    return float(-(counts * np.log2(np.where(p > 0, p, 1))).sum())


@pytest.mark.parametrize("A", [2, 31, 255])
def test_the_coder_loses_nothing_and_takes_what_the_entropy_says(A):
    n, C = 6000, 8
    p = RNG.dirichlet(np.full(A, 0.3), size=C)
    symbols = np.stack([RNG.choice(A, n, p=row) for row in p], 1).astype(np.uint8)
    tables = symbol_tables(symbols, A)
    words, states = rans.encode([(symbols, tables)])
    (decoded,) = rans.decode(words, states, [(n, tables)])
    np.testing.assert_array_equal(decoded, symbols)
    entropy_bits = entropy(tables.counts)
    assert entropy_bits < 16 * len(words) + 32 * C < 1.03 * entropy_bits + 32 * C


def test_distributions_of_one_symbol_take_nothing():
    symbols = np.tile(np.array([0, 6, 3], np.uint8), (500, 1))
    tables = symbol_tables(symbols, 7)
    words, states = rans.encode([(symbols, tables)])
    assert words.size == 0
    np.testing.assert_array_equal(rans.decode(words, states, [(500, tables)])[0], symbols)


def test_rare_symbols_keep_a_frequency():
    counts = np.array([[10**6, 1, 0, 1], [1, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 5]])
    frequencies = rans.frequencies(counts)
    np.testing.assert_array_equal(frequencies.sum(1), rans.TOTAL_FREQUENCY)
    assert (frequencies[counts > 0] > 0).all() and (frequencies[[0, 1], [2, 3]] == 0).all()
    many = rans.frequencies(np.array([[10**6] * 128 + [1] * 127]))
    assert many.min() == 1 and many.sum() == rans.TOTAL_FREQUENCY


def test_parts_follow_each_other_and_lanes_may_share_a_distribution():
    first, second = (RNG.integers(0, A, (n, 6)).astype(np.uint8) for A, n in ((200, 5), (3, 40)))
    shared = rans.Tables(np.bincount(first.ravel(), minlength=200)[None], np.zeros(6, np.int64))
    none = np.zeros((0, 6), np.uint8)
    own = symbol_tables(second, 3)
    words, states = rans.encode([(first, shared), (none, symbol_tables(none, 4)), (second, own)])
    decoded = rans.decode(words, states, [(5, shared), (0, symbol_tables(none, 4)), (40, own)])
    np.testing.assert_array_equal(decoded[0], first)
    np.testing.assert_array_equal(decoded[2], second)


def test_words_that_are_not_what_was_encoded_are_refused():
    symbols = RNG.integers(0, 50, (300, 4)).astype(np.uint8)
    tables = symbol_tables(symbols, 50)
    words, states = rans.encode([(symbols, tables)])
    for damaged in (words[:-9], np.append(words, words[:3])):
        with pytest.raises(KvjaxError, match="do not end where they should"):
            rans.decode(damaged, states, [(300, tables)])


def round_to_levels(x: np.ndarray, levels: int) -> np.ndarray:
    """Rounds one token's channels to multiples of its largest magnitude over levels // 2 - 1."""
    max_code = levels // 2 - 1
    largest = float(np.abs(x).max().astype(jnp.bfloat16))
    return np.round(x / largest * max_code) / max_code * largest if largest else np.zeros_like(x)


def quantize_by_rule(x: np.ndarray, levels: int, group: int) -> np.ndarray:
    """Quantizes keys or values [K S H] of one sequence in one layer as the file should hold them, token by token."""
    K, S, H = x.shape
    x = x.transpose(1, 0, 2).reshape(S, K * H).astype(np.float64)
    quantized = np.zeros_like(x)
    anchor = np.zeros(K * H)
    for t in range(S):
        if group and t % group == 0:
            anchor = quantized[t] = round_to_levels(x[t], 256)
        else:
            quantized[t] = anchor + round_to_levels(x[t] - anchor, levels)
    return quantized.reshape(S, K, H).transpose(1, 0, 2)


@pytest.mark.parametrize("group", [0, 1, 10])
def test_what_is_read_is_what_the_rule_says(tmp_path, group):
    loaded = kvjax.cachegen.read(
        make_model(), kvjax.cachegen.write(tmp_path / "file", read_texts(), levels=LEVELS, group=group)
    )
    for layer, (prompt, read, levels) in enumerate(zip(read_texts().prompts, loaded.prompts, LEVELS, strict=True)):
        for side, (x, y, n) in enumerate(zip(prompt[:2], read[:2], levels, strict=True)):
            for row, length in enumerate(LENGTHS):
                expected = quantize_by_rule(np.asarray(x)[row, :, :length], n, group)
                place = f"layer {layer}, side {side}, row {row}"
                np.testing.assert_allclose(np.asarray(y)[row, :, :length], expected, atol=2e-6, err_msg=place)
    np.testing.assert_array_equal(loaded.lengths, read_texts().lengths)
    np.testing.assert_array_equal(loaded.last_logits, read_texts().last_logits)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_it_goes_on_as_the_cache_in_levels_does(tmp_path):
    """Prompts quantized by the rule here, and compressed by a method, give the answers of the file."""
    loaded = kvjax.cachegen.read(make_model(), kvjax.cachegen.write(tmp_path / "file", read_texts(), levels=8))
    prompts = []
    for prompt in read_texts().prompts:
        k, v = (np.zeros(x.shape, np.float32) for x in prompt[:2])
        for row, n in enumerate(LENGTHS):
            k[row, :, :n], v[row, :, :n] = (quantize_by_rule(np.asarray(x)[row, :, :n], 8, 0) for x in prompt[:2])
        prompts.append(prompt._replace(k=jnp.asarray(k), v=jnp.asarray(v)))
    by_hand = dataclasses.replace(read_texts(), prompts=tuple(prompts))
    question = [[5, 6], [7], [8, 9]]
    for method in ("full", "keydiff:budget=12 + int8"):
        answer, expected = (x.compress(method, 96).ask(question, max_new_tokens=6) for x in (loaded, by_hand))
        assert answer.tokens == expected.tokens
    exact, quantized = (x.compress("full", 96).feed(question).last_logits for x in (read_texts(), loaded))
    assert np.abs(quantized - exact).max() > 1e-3  # it is not the exact cache
    with pytest.raises(KvjaxError, match="read the prompts' tokens with it"):
        loaded.compress("snapkv:budget=8,window=4", 96)


def test_more_levels_come_nearer_and_take_more(tmp_path):
    errors, sizes = [], []
    for levels in (4, 16, 64, 256):
        path = kvjax.cachegen.write(tmp_path / "file", read_texts(), levels=levels)
        read = kvjax.cachegen.read(make_model(), path).prompts[1].v[0, :, : LENGTHS[0]]
        errors.append(float(np.abs(read - read_texts().prompts[1].v[0, :, : LENGTHS[0]]).max()))
        sizes.append(path.stat().st_size)
    assert errors == sorted(errors, reverse=True) and sizes == sorted(sizes)
    assert errors[-1] < 0.01 * float(np.abs(read_texts().prompts[1].v[0, :, : LENGTHS[0]]).max())


def test_bytes_are_less_than_those_of_packed_bits(tmp_path):
    """16 levels take less than 4 bits per number if, as in a model, a few channels are large."""
    n, C = 1024, 16
    channels = np.where(np.arange(C) % 8 == 0, 4.0, 0.7)
    vectors = RNG.normal(size=(2, 2, n, C)) * channels
    x = jnp.asarray(vectors.reshape(2, 2, n, 2, 8).swapaxes(2, 3), jnp.float32)  # [layer side K S H]
    lengths = jnp.asarray([n], jnp.int32)
    layer_prompts = [
        prompt._replace(k=pair[0][None], v=pair[1][None]) for prompt, pair in zip(read_texts().prompts, x, strict=True)
    ]
    exact = dataclasses.replace(
        read_texts(), prompts=tuple(layer_prompts), lengths=lengths, last_logits=read_texts().last_logits[:1]
    )
    path = kvjax.cachegen.write(tmp_path / "file", exact, levels=16)
    num_numbers = vectors.size
    scale_bits = 16 * vectors.size // C
    read = kvjax.cachegen.read(make_model(), path)
    codes = [np.asarray(y)[0].swapaxes(0, 1).reshape(n, C) for prompt in read.prompts for y in prompt[:2]]
    entropy_bits = 0.0
    for y in codes:
        levels = np.round(y / np.abs(y).max(1, keepdims=True) * 7).astype(int) + 7
        entropy_bits += entropy(np.stack([np.bincount(column, minlength=15) for column in levels.T]))
    file_bits = 8 * path.stat().st_size
    assert file_bits < 1.15 * (entropy_bits + scale_bits)  # the rest is tables, states and the archive itself
    assert file_bits < 32 * num_numbers / 7  # fp32
    # 4 bits with a scale and a zero point of 16 bits for each 32 numbers
    assert file_bits < (4 + 2 * 16 / 32) * num_numbers


@pytest.mark.parametrize("group", [0, 10])
def test_tokens_of_zeros_and_constants_stay_what_they_are(tmp_path, group):
    k = jnp.where(jnp.arange(128, dtype=jnp.int32)[None, None, :, None] < 30, 0.0, 3.0)
    k = jnp.broadcast_to(k, read_texts().prompts[0].k.shape)
    tiny = jnp.full_like(k, 1e-40)
    prompts = tuple(prompt._replace(k=k, v=tiny) for prompt in read_texts().prompts)
    exact = dataclasses.replace(read_texts(), prompts=prompts)
    read = kvjax.cachegen.read(make_model(), kvjax.cachegen.write(tmp_path / "file", exact, group=group))
    np.testing.assert_allclose(read.prompts[0].k[0, :, :70], k[0, :, :70], atol=1e-6)
    assert np.isfinite(read.prompts[1].v).all() and float(np.abs(read.prompts[1].v).max()) < 1e-38


def test_what_lies_in_padding_does_not_matter(tmp_path):
    path = kvjax.cachegen.write(tmp_path / "file", read_texts(), group=10)
    is_token = jnp.arange(read_texts().prompts[0].k.shape[2], dtype=jnp.int32)[None] < read_texts().lengths[:, None]
    filled = [
        prompt._replace(**{x: jnp.where(is_token[:, None, :, None], getattr(prompt, x), jnp.inf) for x in "kv"})
        for prompt in read_texts().prompts
    ]
    other = kvjax.cachegen.write(tmp_path / "other", dataclasses.replace(read_texts(), prompts=tuple(filled)), group=10)
    assert other.read_bytes() == path.read_bytes()


def test_a_context_under_full_is_written_too_and_sixteen_bits_are_read_back(tmp_path):
    half = kvjax.random_model(make_model().config, dtype=jnp.bfloat16)
    context = kvjax.read(half, [[1, 2, 3, 4], [5, 6]], "full", headroom=0)
    read = kvjax.cachegen.read(half, kvjax.cachegen.write(tmp_path / "file", context, levels=256))
    assert read.lengths.tolist() == [4, 2]
    np.testing.assert_array_equal(read.last_logits, context.last_logits)
    for prompt, layer in zip(read.prompts, context.cache.layers, strict=True):
        assert prompt.k.dtype == prompt.v.dtype == jnp.bfloat16
        exact_values = np.asarray(memory.unpack(layer.v), np.float32)[0, :, :4]
        values = np.asarray(prompt.v, np.float32)[0, :, :4]
        np.testing.assert_allclose(values, exact_values, atol=0.01 * abs(exact_values).max())


def test_a_file_is_the_same_on_a_mesh(tmp_path):
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "model"))
    spread = dataclasses.replace(make_model(), mesh=mesh)
    path = kvjax.cachegen.write(tmp_path / "file", read_texts(), levels=256)
    on_one_device, on_mesh = kvjax.cachegen.read(make_model(), path), kvjax.cachegen.read(spread, path)
    k = on_mesh.prompts[1].k
    assert {x.data.shape[1] for x in k.addressable_shards} == {make_model().config.kind(0).attention.kv_heads // 2}
    np.testing.assert_array_equal(k, on_one_device.prompts[1].k)
    first, second = (
        kvjax.cachegen.write(tmp_path / name, x, levels=256)
        for name, x in (("mesh", on_mesh), ("one_device", on_one_device))
    )
    assert first.read_bytes() == second.read_bytes()


def test_default_levels_are_those_of_public_code(tmp_path):
    """The public table has 32 levels for keys in the first 10 of 32 layers and for values in the first 2, else 16."""
    header, _ = archive.read(kvjax.cachegen.write(tmp_path / "file", read_texts()), cachegen.FORMAT, make_model())
    assert header["levels"] == [32, 32, 16, 16]
    of_32 = cachegen.default_levels(32)
    assert [k for k, _ in of_32] == [32] * 10 + [16] * 22 and [v for _, v in of_32] == [32] * 2 + [16] * 30


def test_another_model_version_or_a_damaged_file_is_refused(tmp_path):
    path = kvjax.cachegen.write(tmp_path / "file", read_texts())
    with pytest.raises(KvjaxError, match="another configuration or dtype than random; load that model"):
        kvjax.cachegen.read(toy_model(layers=3), path)
    with pytest.raises(KvjaxError, match="other weights than random"):
        kvjax.cachegen.read(toy_model(seed=1, layers=2), path)
    with pytest.raises(KvjaxError, match="this kvjax reads version 3 of 'kvjax-context'"):
        kvjax.resume(make_model(), path)
    content = path.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    for damaged in (b"", content[:middle], flipped):
        path.write_bytes(damaged)
        with pytest.raises(KvjaxError, match="is no file of the format .*, or a damaged one"):
            kvjax.cachegen.read(make_model(), path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"levels": 3}, "levels must be an integer from 4 to 256, got 3"),
        ({"levels": [(16, 16), (257, 16)]}, "levels must be an integer from 4 to 256, got 257"),
        ({"levels": [(16, 16)]}, "2 numbers of levels for the keys and values of 2 layers"),
        ({"group": -1}, "group must be an integer from 0 .* got -1"),
    ],
)
def test_bad_input_is_named(tmp_path, arguments, says):
    with pytest.raises(KvjaxError, match=says):
        kvjax.cachegen.write(tmp_path / "file", read_texts(), **arguments)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_says_so(tmp_path):
    with pytest.raises(KvjaxError, match="read the documents under it"):
        kvjax.cachegen.write(tmp_path / "file", kvjax.read(make_model(), [[1, 2]], "int8", headroom=0))
    prompts = (
        read_texts().prompts[0]._replace(k=read_texts().prompts[0].k.at[0, 0, 3, 2].set(jnp.nan)),
        read_texts().prompts[1],
    )
    windowed = toy_model(layers=2, windows=(4, None))
    with pytest.raises(KvjaxError, match="hold the last 4 tokens.*full . in_windows"):
        cachegen.write(tmp_path / "a", kvjax.read(windowed, [list(range(40))], "full", headroom=8))
    cachegen.write(tmp_path / "a", kvjax.read(windowed, [list(range(40))], "full + in_windows", headroom=8))
    assert cachegen.read(windowed, tmp_path / "a").lengths.tolist() == [40]
    with pytest.raises(KvjaxError, match="are not finite"):
        kvjax.cachegen.write(tmp_path / "file", dataclasses.replace(read_texts(), prompts=prompts))
