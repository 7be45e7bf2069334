"""Each benchmark in miniature: its results and its output, not its speed."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import pytest

import kvjax
from experiments.bench import (
    compile,
    decode,
    decoders,
    dtypes,
    first_answers,
    heads,
    host,
    measuring,
    memory,
    prefill,
    process,
    products,
    shapes,
)
from kvjax.models import checkpoint
from kvjax.testing import toy_model

METHOD = kvjax.methods.full()


@pytest.fixture(scope="module")
def toy() -> kvjax.Model:
    return toy_model()


@pytest.fixture(scope="module")
def peer(toy) -> decoders.TransformersDecoder | None:
    return None if decoders.missing_packages() else decoders.TransformersDecoder(toy)


@pytest.fixture
def toy_shapes(monkeypatch, toy):
    for module in (decode, heads, prefill):
        monkeypatch.setitem(module.SHAPES, "toy", toy.config)


def last_line(capsys) -> dict:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_sides_take_turns_and_every_other_round_is_reversed(monkeypatch):
    monkeypatch.setattr(measuring, "PAUSE_SECONDS", 0.0)
    order = []
    runs = {name: (lambda name=name: order.append(name) or float(len(order))) for name in "abc"}
    seconds = measuring.time_in_turns(runs, 2)
    assert "".join(order) == "abccba"
    assert seconds == {"a": [1.0, 6.0], "b": [2.0, 5.0], "c": [3.0, 4.0]}


def test_summary_is_of_the_repeats():
    assert measuring.summary([3.0, 1.0, 10.0]) == {"median": 3.0, "best": 1.0, "worst": 10.0}


def test_report_ends_with_one_json_document(capsys):
    table = measuring.table("title", ("a", "b"), [(1, None)])
    measuring.report("name", measuring.machine(), [table], ["a note"], [{"x": 1.5}])
    *people, document = capsys.readouterr().out.strip().splitlines()
    assert any("title" in line for line in people) and "a note" in people
    document = json.loads(document)
    assert document["benchmark"] == "name" and document["results"] == [{"x": 1.5}]
    assert document["machine"]["cores"] >= 1 and document["machine"]["jax"] == jax.__version__


def sizes(tied: bool) -> tuple[kvjax.Config, Any]:
    """A configuration, and the shapes of its parameters."""
    config = kvjax.Config(97, 32, 3, heads=4, kv_heads=2, head_dim=8, mlp_width=48, tie_embeddings=tied)
    return config, jax.eval_shape(lambda: kvjax.random_model(config).params)


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_of_a_step_counted_by_hand(tied):
    config, params = sizes(tied)
    # Per layer: two norms, q and o (4 heads of 8), k and v (2 heads of 8), three MLP matrices. 97 tokens, width 32.
    layer = 2 * 32 + 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    weights = 3 * layer + 32 + 97 * 32
    rows = 0 if tied else 5 * 32  # a tied table is read as the head anyway
    cache = 2 * 5 * 3 * 16 * 11
    assert shapes.decode_bytes(config, params, batch=5, context=11) == 4 * (weights + rows + cache)


@pytest.mark.parametrize("tied", [False, True])
def test_operations_of_a_prefill_counted_by_hand(tied):
    config, params = sizes(tied)
    per_token = 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    pairs = sum(t + 1 for t in range(7))  # token t attends to t + 1 tokens: a dot product and a mix of 8 in 4 heads
    once = 2 * (7 * per_token + 3 * 4 * 8 * 2 * pairs + 97 * 32)
    assert shapes.prefill_flops(config, params, batch=2, tokens=7) == 2 * once


def test_125m_has_the_stated_size():
    config = shapes.SHAPES["125m"]
    assert (config.layers, config.width, config.vocab_size) == (12, 768, 32_000)
    params = jax.eval_shape(lambda: kvjax.random_model(config).params)
    assert "134.1M parameters" in shapes.describe("125m", config, params)


def test_weights_reach_the_peer_as_the_same_maps(toy):
    c, rng = toy.config, np.random.default_rng(0)
    peer_weights = dict(decoders.state_dict(c, toy.params))
    assert len(peer_weights) == 3 + 9 * c.layers
    kernels, prefix = toy.params["layer_1"]["attention"], "model.layers.1.self_attn."
    x = rng.normal(size=c.width).astype(np.float32)
    q = np.einsum("d,dkgh->kgh", x, np.asarray(kernels["q"]["kernel"])).reshape(c.heads, c.head_dim)
    np.testing.assert_allclose((peer_weights[prefix + "q_proj.weight"] @ x).reshape(c.heads, -1), q, atol=1e-5)
    out = np.einsum("kgh,kghd->d", q.reshape(c.kv_heads, c.groups, -1), np.asarray(kernels["o"]["kernel"]))
    np.testing.assert_allclose(peer_weights[prefix + "o_proj.weight"] @ q.reshape(-1), out, atol=1e-4)
    np.testing.assert_array_equal(peer_weights["lm_head.weight"], np.asarray(toy.params["head"]["kernel"]).T)


def test_slices_of_our_loop_are_what_generate_gives(toy):
    ids = np.random.default_rng(0).integers(0, toy.config.vocab_size, (2, 9), np.int32)
    side = decoders.KvjaxDecoder(toy, METHOD)
    side.prefill(ids, room=5)
    assert side.decode(2) > 0 and side.decode(3) > 0
    whole = kvjax.generate(toy, ids, METHOD, max_new_tokens=6, eos_ids=())
    assert side.tokens.tolist() == whole.tokens


def test_decode_measures_both_sides_on_the_same_tokens(toy, peer):
    probe = measuring.read_probes(megabytes=1)
    cell = decode.measure(toy, peer, probe, context=20, batch=2, steps=2, repeats=3, methods=["accumulated:budget=8"])
    sides = ["full", "accumulated:budget=8"] + ["transformers"] * (peer is not None)
    assert list(cell["tokens_per_second"]) == sides
    for name in sides:
        assert cell["tokens_per_second"][name] == 2 / cell["seconds_per_step"][name]["median"]
    assert cell["bytes_per_step"] == shapes.decode_bytes(toy.config, toy.params, 2, 20 + decode.WARM_UP + 3)
    assert cell["limit"] == pytest.approx(2 * cell["bandwidth"] / cell["bytes_per_step"])
    assert cell["same_tokens"] in (None, 1.0)
    lines = decode.rows("toy", cell)
    assert [line[3] for line in lines] == ["full", "accumulated:budget=8"]
    assert {len(line) for line in lines} == {len(decode.COLUMNS)}


def test_decode_stops_when_the_sides_differ():
    class Side:
        def __init__(self, *tokens):
            self.tokens = np.array([tokens])

    decode.check_same_tokens(Side(1, 2), Side(1, 2))
    with pytest.raises(AssertionError, match=r"kvjax \[\[1, 2\]\], transformers \[\[1, 3\]\]"):
        decode.check_same_tokens(Side(1, 2), Side(1, 3))


def test_decode_without_transformers_says_so(toy_shapes, monkeypatch, capsys):
    monkeypatch.setattr(decode, "missing_packages", lambda: "torch")
    monkeypatch.setattr(decoders, "missing_packages", lambda: "torch")
    arguments = "--models toy --contexts 8 --batches 1,2 --steps 1 --repeats 1 --read-megabytes 1"
    decode.main(arguments.split())
    out = capsys.readouterr().out
    assert "left out: not installed: torch" in out
    results = json.loads(out.strip().splitlines()[-1])["results"]
    assert [(r["model"], r["context"], r["batch"]) for r in results] == [("toy", 8, 1), ("toy", 8, 2)]
    assert all(list(r["tokens_per_second"]) == ["full"] for r in results)


def test_heads_of_unequal_length_are_measured_beside_equal_ones(toy_shapes, capsys):
    heads.main("--models toy --tokens 200 --batches 1,2 --pages 4,8 --steps 1 --repeats 2".split())
    cells = last_line(capsys)["results"]
    assert [(c["model"], c["tokens"], c["batch"]) for c in cells] == [("toy", 200, 1), ("toy", 200, 2)]
    for cell in cells:
        equal, *others = cell["sides"].values()
        assert equal["tokens_of_a_head"] == [50, 50.0, 50] and len(others) == 4
        for side in others:
            least, mean, most = side["tokens_of_a_head"]
            page = int(side["method"].split("page=")[1].split(",")[0])
            assert least < mean < most and mean == 50 - page
            assert side["bytes"]["held"] <= 1.02 * equal["bytes"]["held"]
        assert {len(line) for line in heads.rows("toy", 200, 1, cell["sides"])} == {len(heads.COLUMNS)}


def test_all_programs_of_a_product_read_the_same_weights(capsys):
    products.main("--shapes 128x256,64x128 --rows 1,4 --megabytes 1 --repeats 1".split())
    cells = last_line(capsys)["results"]
    expected = [(shape, rows) for shape in ([128, 256], [64, 128]) for rows in (1, 4)]
    assert [(c["shape"], c["rows"]) for c in cells] == expected
    assert all(c["bytes"] == products.PASSES * 2**20 and list(c["seconds"]) == list(products.PROGRAMS) for c in cells)
    assert {len(products.row(c)) for c in cells} == {len(products.COLUMNS)}
    rng = np.random.default_rng(0)
    x, a, b = (rng.normal(size=s).astype(np.float32) for s in ((4, 8), (8, 16), (16, 8)))
    for multiply, _ in products.PROGRAMS.values():
        np.testing.assert_allclose(products.multiply_all(x, [a, b], multiply), x @ a @ b, rtol=1e-4)


def test_prefill_measures_operations_per_second(toy_shapes, capsys):
    prefill.main("--models toy --tokens 24 --repeats 2 --product 64 --methods snapkv;accumulated:budget=8".split())
    (cell,) = last_line(capsys)["results"]
    ours, peers = ["full", "snapkv", "accumulated:budget=8"], [] if decoders.missing_packages() else ["transformers"]
    assert list(cell["seconds"]) == ours + peers
    for name, s in cell["seconds"].items():
        assert cell["flops_per_second"][name] == pytest.approx(cell["flops"] / s["median"])
    assert len(prefill.rows("toy", cell)[0]) == len(prefill.COLUMNS)


@pytest.mark.parametrize("chunk", [None, 32])
def test_a_very_long_prompt_reports_its_peak(toy, tmp_path, chunk):
    checkpoint.save(tmp_path / "toy", toy.config, toy.params)
    r = prefill.run_long_prompt(str(tmp_path / "toy"), 96, chunk)
    assert 2**20 < r["before"] <= r["peak"] < 2**40
    assert r["s_by_s"] == 4 * 4 * 96 * 96
    assert r["state"]["device"] > 2 * 3 * 2 * 8 * 96 * 4


def test_rows_are_written_and_recalled_on_the_host():
    rows = host.HostBuffer(megabytes=1, n=4, steps=3)
    assert rows.seconds() > 0
    assert rows.buf.host and rows.buf.data.nbytes == 2**20
    written_rows = np.asarray(rows.buf.data).view(np.float32)
    assert (written_rows[:, :, :3] == 1).all() and not written_rows[:, :, 3:].any()


def test_host_holds_the_stated_bytes_and_never_copies_them(capsys):
    host.main("--megabytes 1 --n 4 --steps 2 --row-steps 2 --repeats 2".split())
    results = last_line(capsys)["results"]
    assert [list(r) for r in results["memory"]] == [["megabytes", "append", "recall"]]
    (cell,) = results["decode"]
    assert list(cell["seconds_per_step"]) == ["kcache", "kcache, V on device", "offload"]
    assert [b["pinned_host"] for b in cell["bytes"].values()] == [2**20, 0, 2**21]
    assert cell["full_copies"] == []


def test_compile_tells_every_program_cold_and_warm(capsys, monkeypatch, toy):
    monkeypatch.setitem(compile.SHAPES, "toy", toy.config)
    before = jax.config.jax_compilation_cache_dir
    compile.main(["--shape", "toy", "--depths", "2,5", "--methods", "full;snapkv", "--tokens", "2"])
    assert jax.config.jax_compilation_cache_dir == before
    cells = last_line(capsys)["results"]
    assert [(c["method"], c["layers"]) for c in cells] == [(m, n) for n in (2, 5) for m in ("full", "snapkv")]
    for cell in cells:
        for run in (cell["cold"], cell["warm"]):
            assert set(run["stages"]) == {"trace", "lower", "compile"} and run["seconds"] > 0
            assert run["programs"] == len(run["stages"]["compile"]) and "apply_layer" in run["stages"]["compile"]


def test_compile_asks_for_a_loop(capsys, monkeypatch, toy):
    monkeypatch.setitem(compile.SHAPES, "toy", toy.config)
    compile.main(["--shape", "toy", "--depths", "3", "--methods", "full", "--tokens", "2", "--loop", "while"])
    (cell,) = last_line(capsys)["results"]
    assert cell["loop"] == "while" and "until" in "".join(cell["cold"]["stages"]["compile"])


def test_dtypes_are_measured_in_turns(toy, tmp_path, capsys):
    checkpoint.save(tmp_path / "toy", toy.config, toy.params)
    dtypes.main(f"--model {tmp_path / 'toy'} --context 20 --batches 1,2 --steps 2 --repeats 2".split())
    results = last_line(capsys)["results"]
    sides = ["kvjax"] + ["transformers"] * (decoders.missing_packages() is None)
    each = [(batch, side, dtype) for batch in (1, 2) for dtype in ("float32", "bfloat16") for side in sides]
    assert [(r["batch"], r["side"], r["dtype"]) for r in results] == each
    assert all(r["prefill_seconds"] > 0 and r["tokens_per_second"] > 0 for r in results)


def test_a_tied_head_reaches_the_peer_as_the_embedding():
    model = kvjax.random_model(sizes(tied=True)[0], dtype="bfloat16")
    peer_weights = dict(decoders.state_dict(model.config, model.params))
    np.testing.assert_array_equal(peer_weights["lm_head.weight"], peer_weights["model.embed_tokens.weight"])
    if not decoders.missing_packages():
        module = decoders.TransformersDecoder(model).module
        assert {str(weight.dtype) for weight in module.parameters()} == {"torch.bfloat16"}
        assert module.lm_head.weight.data_ptr() == module.model.embed_tokens.weight.data_ptr()


def test_memory_of_each_stage_is_told(toy, tmp_path):
    checkpoint.save(tmp_path / "toy", toy.config, toy.params)
    peaks = process.run_in_process(memory.measure_peaks, str(tmp_path / "toy"), "bfloat16", 20)
    assert peaks["before"] <= peaks["loaded"] <= peaks["read"] <= peaks["decoded"] < 2**40
    assert peaks["weights"] == sum(x.size for x in jax.tree.leaves(toy.params)) * 2
    # Keys and values of 20 tokens and room for 16 more, in pages of 16.
    assert peaks["cache"] >= 2 * toy.config.layers * toy.config.kv_heads * toy.config.head_dim * 36 * 2
    assert len(memory.row("toy", "bfloat16", 20, peaks)) == len(memory.COLUMNS)


def test_the_peak_of_a_new_process_is_its_own():
    large_array = np.ones(2**27, np.uint8)
    own_peak = process.peak_bytes()
    assert large_array.nbytes < own_peak and process.run_in_process(process.peak_bytes) < own_peak


def test_a_process_of_its_own_that_fails_ends_the_run():
    with pytest.raises(SystemExit, match="the process that ran measure_peaks ended with status 1"):
        process.run_in_process(memory.measure_peaks, "/nowhere", "float32", 20)


def test_first_answers_tells_cold_warm_and_from_disk(capsys):
    first_answers.main(["--model", "testbed", "--tokens", "64", "--methods", "snapkv:budget=25%"])
    (cell,) = last_line(capsys)["results"]
    assert (cell["method"], cell["tokens"]) == ("snapkv:budget=25%", 64)
    for name in ("cold", "second", "third", "disk"):
        assert cell[name]["read"] > 0 and cell[name]["answer"] > 0
    assert cell["cold"]["bytes"] == cell["disk"]["bytes"]
