"""Compiled programs: the options that the compiler gets, and when programs are dropped."""

from __future__ import annotations

import dataclasses
import os

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax import cli
from kvjax.core import compile_cache, matmul
from kvjax.core.kernels import use_kernels
from kvjax.core.matmul import NO_PACKING
from kvjax.engine import forward
from kvjax.errors import KvjaxError, KvjaxWarning
from kvjax.generation import programs
from kvjax.generation.programs import jit_with
from kvjax.testing import toy_model


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "tied", "options"),
    [
        (4, 768, jnp.float32, False, NO_PACKING),
        (32, 2048, jnp.float32, False, NO_PACKING),
        (8, 768, jnp.float32, True, {}),
        (4, 576, jnp.float32, False, {}),
        (1, 768, jnp.float32, False, {}),
        (64, 768, jnp.float32, False, {}),
        (4, 768, jnp.bfloat16, False, {}),
    ],
    ids=[
        "4-768-float32-False-told0",
        "32-2048-float32-False-told1",
        "8-768-float32-True-told2",
        "4-576-float32-False-told3",
        "1-768-float32-False-told4",
        "64-768-float32-False-told5",
        "4-768-bfloat16-False-told6",
    ],
)
def test_few_rows_of_large_float32_weights_are_multiplied_without_packing(rows, width, dtype, tied, options):
    assert matmul.compiler_options(rows, width, dtype, tied) == options


def test_the_options_reach_the_compiler(monkeypatch):
    monkeypatch.setattr(matmul, "compiler_options", lambda *args: {"xla_backend_optimization_level": "high"})
    programs._supported_options.cache_clear()
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_backend_optimization_level"):
        programs.options_for(1, 8, jnp.float32)


def test_what_a_version_of_the_compiler_does_not_know_is_left_out(monkeypatch):
    monkeypatch.setattr(matmul, "compiler_options", lambda *args: {"xla_of_another_version": "true"})
    assert programs.options_for(1, 8, jnp.float32) == ()


def test_a_process_with_many_mappings_drops_its_programs_and_goes_on(monkeypatch):
    model = toy_model(layers=1)
    expected = kvjax.generate(model, [[5, 3, 8]], "snapkv:budget=4,window=2", max_new_tokens=4).tokens
    clear_compiled, calls = compile_cache.clear_compiled, []

    def clear_and_record():
        calls.append(clear_compiled())

    monkeypatch.setattr(compile_cache, "MAX_MAPPINGS", 0)
    monkeypatch.setattr(programs, "_MANY_PROGRAMS", 0)  # every call then drops what was compiled before it
    monkeypatch.setattr(compile_cache, "clear_compiled", clear_and_record)
    assert kvjax.generate(model, [[5, 3, 8]], "snapkv:budget=4,window=2", max_new_tokens=4).tokens == expected
    assert calls


def test_compilation_is_told_apart_from_running():
    model = toy_model(layers=1, head_dim=24)  # a size that no other test has
    first, second = (kvjax.generate(model, [[5, 3, 8]], "full", max_new_tokens=4) for _ in range(2))
    assert first.compile_seconds > 0 == second.compile_seconds
    assert min(first.prefill_seconds, first.decode_seconds) > 0


def test_a_batch_on_a_wide_model_is_decoded_without_packing_and_as_its_rows_alone(monkeypatch):
    model, prompts = toy_model(width=768, layers=1), [[5, 3, 8], [7], [1, 2], [9, 9, 4]]
    texts, donated = [], ("state", "hidden")
    run_layer = jit_with(forward.apply_layer, ("call", "target"), donated, tuple(NO_PACKING.items()))

    def run_and_record_program(*args, **static):
        texts.append(run_layer.lower(*args, **static).compile().as_text())
        return run_layer(*args, **static)

    target_for = programs.target_for

    def target_with_records(model, num_tokens, **more):
        target = target_for(model, num_tokens, **more)
        is_recorded = target.run_layer is run_layer
        return dataclasses.replace(target, run_layer=run_and_record_program) if is_recorded else target

    monkeypatch.setattr("kvjax.generation.session.target_for", target_with_records)
    together = kvjax.generate(model, prompts, "full", max_new_tokens=4)
    assert len(texts) == 3 and "f32[4,768]" in texts[0]
    assert all("dot(" in text and "ynn" not in text for text in texts)
    monkeypatch.undo()
    for prompt, tokens in zip(prompts, together.tokens, strict=True):
        assert kvjax.generate(model, [prompt], "full", max_new_tokens=4).tokens == [tokens]


def test_without_compiling_the_same_tokens_come():
    model, prompts = toy_model(layers=1), [[1, 2, 3, 4, 5, 6], [7]]
    method = "snapkv:budget=4,window=2 + kvcrush + kcache:n=2,device_layers=0"
    compiled = kvjax.generate(model, prompts, method, max_new_tokens=2).tokens
    with jax.disable_jit():
        assert kvjax.generate(model, prompts, method, max_new_tokens=2).tokens == compiled


def test_sixty_four_bits_are_refused():
    model = toy_model(layers=1)
    with jax.enable_x64(True), pytest.raises(KvjaxError, match="JAX_ENABLE_X64 is set: unset it"):
        kvjax.generate(model, [[5, 3, 8]], "full", max_new_tokens=2)


@pytest.fixture
def without_cache(monkeypatch):
    """JAX without a folder of compiled programs, as a new process has it; the tests' own is put back."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.delenv("KVJAX_COMPILATION_CACHE", raising=False)
    compile_cache._is_usable.cache_clear()
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compile_cache._is_usable.cache_clear()


NO_FOLDERS = ["file", "file/below", "x" * 300, "file/../file/"]


@pytest.mark.parametrize("name", NO_FOLDERS)
@pytest.mark.parametrize("variable", ["KVJAX_CACHE", "XDG_CACHE_HOME"])
def test_without_a_cache_folder_programs_are_not_kept_and_it_is_said_once(
    tmp_path, monkeypatch, without_cache, variable, name
):
    (tmp_path / "file").write_text("mine")
    monkeypatch.delenv("KVJAX_CACHE", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / name))
    says = (
        "compiled programs are not kept: cannot write into .*; give a folder .* KVJAX_CACHE, or set KVJAX_COMPILATION"
    )
    with pytest.warns(KvjaxWarning, match=says) as given:
        compile_cache.use_compilation_cache()
    compile_cache.use_compilation_cache()
    assert len(given) == 1 and jax.config.values["jax_compilation_cache_dir"] is None
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.filterwarnings("default::kvjax.errors.KvjaxWarning")
def test_the_command_line_says_so_in_one_line_and_goes_on(tmp_path, monkeypatch, capsys, without_cache):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").write_text("mine")
    assert cli.main(["generate", "--prompt", "let a = 5;", "--max-new-tokens", "1", "--method", "full"]) == 0
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "not kept" in x]
    assert line.startswith(f"kvjax: compiled programs are not kept: cannot write into {tmp_path / 'file'} (there is a")


def test_the_cache_folder_is_made_where_it_is_named(tmp_path, monkeypatch, without_cache):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, where in (("~/a/b", "a/b"), ("../c", "c"), ("d e", "work/d e")):
        monkeypatch.setenv("KVJAX_CACHE", name)
        jax.config.update("jax_compilation_cache_dir", None)
        compile_cache.use_compilation_cache()
        found = jax.config.values["jax_compilation_cache_dir"]
        assert os.path.isabs(found) and os.path.samefile(found, tmp_path / where)


def test_a_switch_of_the_environment_is_on_or_off(monkeypatch, without_cache):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for word, is_on in {
        "0": False,
        "false": False,
        "No": False,
        "off": False,
        "1": True,
        "true": True,
        "": True,
    }.items():
        monkeypatch.setenv("KVJAX_GPU_KERNELS", word)
        assert use_kernels() == is_on
    for word in ("2", "none", "O", " "):
        for name, read in (
            ("KVJAX_GPU_KERNELS", use_kernels),
            ("KVJAX_COMPILATION_CACHE", compile_cache.use_compilation_cache),
        ):
            monkeypatch.setenv(name, word)
            with pytest.raises(KvjaxError, match=f"the environment variable {name} is '{word}'; set it to 0 or 1"):
                read()
