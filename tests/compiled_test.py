"""Compiled programs are kept for the next start: where, and when not; nothing compiles twice."""

import json
import os
import threading
import types

import jax
import numpy as np
import pytest

import haikutrain
from haikutrain import compiled, devices

# Counts what the compilation cache had and had not, and says so at the end.
COUNTING = """
import atexit, collections, json
counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event.split("/")[-1]]))
atexit.register(lambda: print(json.dumps({n: counts["cache_" + n] for n in ("hits", "misses")})))
"""


@pytest.fixture
def environment(tmp_path):
    """Without the tests' own cache; the user's is in `tmp_path`."""
    kept = {k: v for k, v in os.environ.items() if "COMPILATION_CACHE" not in k}
    kept = {k: v for k, v in kept.items() if "PERSISTENT_CACHE" not in k}
    return {**kept, "XDG_CACHE_HOME": str(tmp_path / "cache")}


def test_a_second_start_compiles_nothing(main, configs, environment, tmp_path):
    """Fresh, and resumed for an evaluation at the end: no program is missing, whatever its form."""
    file = tmp_path / "run.py"
    file.write_text((configs / "plain.py").read_text() + COUNTING)
    counts = []
    for workdir, end in (("a", 2), ("a", 4), ("b", 2), ("b", 4)):
        flags = [f"--config={file}", f"--workdir={tmp_path / workdir}", "--cpu_devices=2"]
        done = main(*flags, f"--config.num_steps={end}", env=environment)
        counts.append(json.loads(done.stdout.splitlines()[-1]))
    assert counts[0]["misses"] >= 3  # Init, update and evaluation at least.
    assert counts[2] == {"hits": counts[0]["misses"], "misses": 0}
    assert counts[3]["misses"] == 0
    (kind,) = (tmp_path / "cache" / "haikutrain" / "compiled").iterdir()
    assert len(list(kind.iterdir())) == counts[0]["misses"] + counts[1]["misses"]


@pytest.fixture
def kept(command, environment):
    """What JAX is told after `keep(choice)` in a fresh process, and what is said on stderr."""

    def run(choice, **changes):
        code = (
            "import jax; from haikutrain import compiled; "
            f"compiled.keep({choice!r}); print(jax.config.jax_compilation_cache_dir)"
        )
        done = command("-c", code, env={**environment, **changes})
        return done.stdout.strip(), done.stderr

    return run


def test_the_folder_is_the_users_unless_another_is_named(kept, tmp_path):
    user = tmp_path / "cache" / "haikutrain" / "compiled"
    folder, said = kept(None)
    assert (os.path.dirname(folder), said) == (str(user), "")
    assert kept(None, XDG_CACHE_HOME="", HOME=str(tmp_path))[0].startswith(
        str(tmp_path / ".cache" / "haikutrain" / "compiled")
    )
    own = str(tmp_path / "own")
    assert kept(own) == (own, "")
    assert os.path.isdir(own)


def test_what_jax_was_told_already_is_left_alone_and_off_is_off(kept, tmp_path):
    told = str(tmp_path / "told")
    assert kept(None, JAX_COMPILATION_CACHE_DIR=told) == (told, "")
    assert kept("off", JAX_COMPILATION_CACHE_DIR=told) == ("None", "")
    assert kept("off") == ("None", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("choice", [None, "in the way/own"])
def test_a_folder_that_cannot_be_written_costs_one_warning(kept, tmp_path, choice):
    (tmp_path / "in the way").write_text("")
    choice = choice and str(tmp_path / choice)
    folder, said = kept(choice, XDG_CACHE_HOME=str(tmp_path / "in the way"))
    assert folder == "None"
    assert said.count("\n") == 1
    assert "in the way" in said
    assert "Not a directory" in said
    assert "config.compilation_cache" in said


def test_another_kind_of_cpu_has_a_folder_of_its_own(monkeypatch):
    here = compiled.user_folder()
    assert here == compiled.user_folder()
    monkeypatch.setattr(compiled, "_cpu", lambda: "flags: sse2")
    assert compiled.user_folder() != here


def test_the_users_folder_does_not_grow_without_end(monkeypatch, tmp_path):
    """What was used longest ago goes, until half of the bound is left."""
    for age in range(10):
        path = tmp_path / str(age)
        path.write_bytes(b"x" * 100)
        os.utime(path, (1e9 - age, 1e9 - age))
    monkeypatch.setattr(compiled, "_MOST_BYTES", 1000)
    compiled._prune(tmp_path)
    assert len(list(tmp_path.iterdir())) == 10
    (tmp_path / "more").write_bytes(b"x")
    compiled._prune(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3", "more"]


def test_a_program_compiles_in_a_thread_once_and_raises_its_error_at_the_first_call():
    threads = []

    def listen(event, duration, **_):
        if event.endswith("backend_compile_duration"):
            threads.append(threading.current_thread().name)

    rows = devices.place_batch(np.arange(8, dtype=np.float32))
    program = devices.Program(lambda x: haikutrain.psum(x * 1.25), (rows,), in_axes=(0,))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        program.compile_ahead()
        results = [np.asarray(program(rows)) for _ in range(3)]
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(threads) == 1
    assert threads[0].startswith("haikutrain-compile")
    for result in results:
        np.testing.assert_array_equal(result, 1.25 * np.array([0 + 2 + 4 + 6, 1 + 3 + 5 + 7]))
    program = devices.Program(lambda x: haikutrain.psum(x), (rows,), in_axes=(0,))

    def fail():
        raise MemoryError("no room to compile")

    program._lowered = lambda: types.SimpleNamespace(compile=fail)
    program.compile_ahead()
    with pytest.raises(MemoryError, match="no room to compile"):
        program(rows)
