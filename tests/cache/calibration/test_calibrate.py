"""Tables calibrated on a text, against NumPy on the exact keys, values and queries of the same text."""

from __future__ import annotations

import numpy as np
import pytest

import kvjax
from kvjax import calibrate
from kvjax.cache.calibration.table_file import TableFile
from kvjax.cli import main
from kvjax.engine.plan import specs
from kvjax.errors import KvjaxError
from kvjax.reuse.full_kv import read_exactly
from kvjax.testing import toy_model

DOCUMENTS = [[5, 9, 2, 7, 7, 1, 30], [3, 8, 4], [11, 2, 2, 19, 6]]


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.fixture(scope="module")
def exact(model):
    """[layer][document]: q [K G n H], k, v [K n H], float64."""
    read = read_exactly(model, DOCUMENTS)

    def document_arrays(layer, b: int) -> tuple[np.ndarray, ...]:
        return tuple(np.asarray(x[b, ..., : len(DOCUMENTS[b]), :], np.float64) for x in (layer.q, layer.k, layer.v))

    return [[document_arrays(layer, b) for b in range(len(DOCUMENTS))] for layer in read.prompts]


def concat_documents(documents, index: int) -> np.ndarray:
    """Concatenates the token vectors of all documents: [K n H]."""
    return np.concatenate([document[index] for document in documents], 1)


def test_bases_are_the_principal_directions_of_each_head(model, exact):
    tables = calibrate.count_arrays(model, "bases", DOCUMENTS, rows=2)
    for arrays, documents in zip(tables, exact, strict=True):
        for name, index in (("keys", 1), ("values", 2)):
            vectors = concat_documents(documents, index)
            mean = vectors.mean(1)
            np.testing.assert_allclose(arrays[f"{name}_mean"], mean, atol=1e-6)
            for head in range(len(vectors)):
                centered = vectors[head] - mean[head]
                _, s, vh = np.linalg.svd(centered, full_matrices=True)
                deviation = np.zeros(vectors.shape[2])
                deviation[: len(s)] = s / np.sqrt(len(centered))
                np.testing.assert_allclose(arrays[f"{name}_deviation"][head], deviation, atol=1e-4)
                alike = np.abs((arrays[name][head] * vh.T).sum(0))  # directions have no sign
                assert alike[: len(s) // 2].min() > 0.999


def test_joint_bases_are_those_of_all_heads_without_rotation(model, exact):
    tables = calibrate.count_arrays(model, "joint_bases", DOCUMENTS)
    spec = specs(model.config)[0]
    for arrays, documents in zip(tables, exact, strict=True):
        pre_rope = [unrotate(k, spec) for _, k, _ in documents]
        vectors = np.concatenate([np.concatenate(list(k), -1) for k in pre_rope])
        basis = arrays["bare_keys"][0]
        np.testing.assert_allclose(basis.T @ basis, np.eye(len(basis)), atol=1e-5)
        coordinates = (vectors - arrays["bare_keys_mean"][0]) @ basis
        np.testing.assert_allclose(coordinates.std(0), arrays["bare_keys_deviation"][0], atol=1e-3)
        np.testing.assert_allclose(coordinates.mean(0), 0, atol=1e-5)


def unrotate(k: np.ndarray, spec) -> np.ndarray:
    pos = np.arange(k.shape[1], dtype=np.int32)[None, None]
    return np.asarray(spec.rope.unrotate(k[None].astype(np.float32), pos)[0], np.float64)


def test_channels_are_ordered_by_the_mean_product_of_each_tokens_query_and_key(model, exact):
    tables = calibrate.count_arrays(model, "channels", DOCUMENTS, rows=3)
    for arrays, documents in zip(tables, exact, strict=True):
        q, k = (np.concatenate([document[i] for document in documents], -2) for i in (0, 1))
        means = np.abs(q * k[:, None]).mean((1, 2))
        np.testing.assert_allclose(arrays["means"], means, rtol=1e-5)
        np.testing.assert_array_equal(arrays["order"], np.argsort(-means, -1, kind="stable"))


def test_from_the_command_line_to_a_method(tmp_path, capsys):
    text, out = tmp_path / "text", tmp_path / "table"
    text.write_text("def f(x):\n    return x\n" * 40)
    assert main(["calibrate", "bases", "testbed", str(out), "--text", str(text), "--tokens=128", "--context=64"]) == 0
    assert "bases of testbed, from 128 tokens" in capsys.readouterr().out
    first = specs(kvjax.load("testbed").config)[0]
    assert TableFile(str(out), "bases").layer_arrays(first, keys=(2, 32, 32))
    assert kvjax.parse(f"matryoshka:table={out}").bind(first)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["basis", "testbed", "out", "--text", "TEXT"], "unknown kind of table 'basis'; there are "),
        (["bases:rank=4", "testbed", "out", "--text", "TEXT"], "'bases:rank=4' is no kind of table: bases has heads="),
        (["bases", "testbed", "out", "--text", "TEXT"], "the text has 2 tokens, and 65536 were asked for"),
        (
            ["bases", "testbed", "out", "--text", "TEXT", "--context=9", "--tokens=8"],
            "tokens must be an integer from 9 to 2147483647, got 8; give at least one context",
        ),
    ],
)
def test_what_cannot_be_calibrated_says_why(arguments, says, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a checkout has a folder `out` once `make demo` has run
    text = tmp_path / "text"
    text.write_text("ab")
    assert main(["calibrate", *(str(text) if a == "TEXT" else a for a in arguments)]) == 2
    assert says in capsys.readouterr().err


def test_groups_of_heads_must_divide_the_layer(model):
    with pytest.raises(KvjaxError, match="heads together do not divide the layer's"):
        calibrate.count_arrays(model, "joint_bases:heads=3", DOCUMENTS)
