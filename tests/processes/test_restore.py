"""Each of two processes reads and checks the shards that it holds, and no others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import kvjax
from kvjax.models import checkpoint
from tests.processes import launch

CONFIG = kvjax.Config.llama(512, 256, 2, 4, 2, 32, 2048, tie_embeddings=True)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory) -> dict[str, Any]:
    """What two processes restored of a checkpoint whose heads they share, and how they ended at a damaged one."""
    folder, model = tmp_path_factory.mktemp("restore"), kvjax.random_model(CONFIG)
    params = jax.tree.map(np.asarray, model.params)
    checkpoint.save(folder / "whole", CONFIG, params)
    params["layer_0"]["attention"]["q"]["kernel"] = params["layer_0"]["attention"]["q"]["kernel"].copy()
    params["layer_0"]["attention"]["q"]["kernel"][:, 1] *= 2  # the heads of process 2
    checkpoint.save(folder / "other", CONFIG, params)
    shutil.copytree(folder / "whole", folder / "damaged")
    shutil.rmtree(folder / "damaged" / "params" / "layer_0")
    shutil.copytree(folder / "other" / "params" / "layer_0", folder / "damaged" / "params" / "layer_0")
    two = launch.start_two("-m", "tests.processes.restoring", "{coordinator}", "{process}", str(folder))
    ends = [(process.communicate(timeout=120)[1], process.returncode) for process in two]
    found = [json.loads((folder / f"{i}.json").read_text()) for i in (1, 2)] if (folder / "2.json").exists() else []
    return {"model": model, "folder": folder, "ends": ends, "found": found}


def test_a_process_reads_what_it_holds(outcome):
    assert outcome["found"], outcome["ends"]
    files = sum(p.stat().st_size for p in (outcome["folder"] / "whole").rglob("*") if p.is_file())
    for number, found in enumerate(outcome["found"]):
        assert 0.45 * files < found["read"] < 0.55 * files
        assert found["weights"] == outcome["model"].fingerprint
        assert found["int8"] == outcome["model"].with_weights("int8").fingerprint
        flat = jax.tree_util.tree_leaves_with_path(outcome["model"].params["layer_1"])
        for path, x in flat:
            bounds, values = found["shards"][jax.tree_util.keystr(path)]
            place = tuple(slice(*b) for b in bounds)
            np.testing.assert_array_equal(np.asarray(values, np.float32), np.asarray(x)[place])
        heads, _ = found["shards"]["['attention']['k']['kernel']"]
        assert heads[1] == [number, number + 1]


def test_processes_that_load_or_evaluate_something_else_are_refused_by_what_differs(outcome):
    first, second = outcome["found"]
    for name, says in (
        ("checkpoint", ["checkpoint is ", "'layer_0': '"]),
        ("dtype", ["dtype is dtype('float32') in process 1 and dtype(bfloat16) in process 2"]),
        ("kind of weights", ["weights is 'int8' in process 1 and None in process 2"]),
        ("evaluation", ["cases is ", "methods is ", "'full': '", "options is "]),
    ):
        assert first[name] == second[name] and all(x in first[name] for x in says), name


def test_a_damaged_shard_is_named_by_the_process_that_holds_it_and_ends_the_other(outcome):
    (errors_1, status_1), (errors_2, status_2) = outcome["ends"]
    damage = "the digest of chunk (0, 1, 0, 0) of layer_0/attention/q/kernel differs"
    assert status_2 == 1 and f"is damaged ({damage}); copy the checkpoint again" in errors_2
    assert status_1 == 1 and "process 2 of 2 ended with an error: KvjaxError: part 'layer_0'" in errors_1
    assert damage in errors_1.strip().splitlines()[-1]
    assert Path(outcome["folder"] / "1.json").exists()
