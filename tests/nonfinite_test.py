"""Losses and gradients that are not finite: stop or skip, on all devices alike, never saved."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haikutrain import nonfinite
from haikutrain.errors import NonFinite

# In the updates after step `config.bad[0]` up to `config.bad[1]` one device has a bad loss.
SOURCE = """

import jax.numpy as jnp
from jax import lax


class Bad(Run):
    def loss(self, batch, is_training):
        losses, metrics = super().loss(batch, is_training)
        begin, end = self.config.bad
        step = haikutrain.step()
        bad = (begin <= step) & (step < end) & (lax.axis_index(haikutrain.AXIS) == DEVICE)
        return losses * jnp.where(bad & is_training, jnp.float32(FACTOR), 1.0), metrics


old_config = get_config


def get_config():
    config = old_config()
    config.experiment = ":Bad"
    config.bad = (13, 14)
    config.num_steps = 24
    config.log_every = 6
    config.checkpoint_every = 4
    config.keep_checkpoints = 9
    return config
"""


def source(device=3, factor="jnp.nan"):
    return SOURCE.replace("DEVICE", str(device)).replace("FACTOR", factor)


def said(err):
    (line,) = [line for line in err.splitlines() if line.startswith("haikutrain: ")]
    return line


def saved(workdir):
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())


@pytest.mark.parametrize("per_call", [1, 2])
@pytest.mark.parametrize("device, factor", [(0, "jnp.nan"), (3, "jnp.inf")])
def test_stop_names_step_and_leaf_and_saves_nothing_of_it(
    run_plain, tmp_path, device, factor, per_call
):
    flag = f"--config.steps_per_call={per_call}"
    code, _, err = run_plain(flag, source=source(device, factor))
    assert code == 3
    # haikutrain.step() is 13 in the fourteenth update.
    assert "step 14: the loss and the gradient of params/batch_norm/offset and " in said(err)
    assert "more leaves are not finite" in said(err)
    assert "config.on_nonfinite='skip'" in said(err)
    assert saved(tmp_path / "work") == [4, 8, 12]


def test_a_bad_gradient_of_a_finite_loss_stops_too(run_plain, tmp_path):
    text = (
        source(factor="1.0")
        + """

class Steep(Run):
    def gradients(self, state, batch, rngs):
        grads, network_state, metrics = super().gradients(state, batch, rngs)
        bad = (state.step == 13) & (lax.axis_index(haikutrain.AXIS) == 2)
        grads["linear_1"]["w"] += jnp.where(bad, jnp.inf, 0.0)
        return grads, network_state, metrics


Bad = Steep
"""
    )
    code, _, err = run_plain(source=text)
    assert code == 3
    assert "step 14: the gradient of params/linear_1/w is not finite; nothing" in said(err)
    assert saved(tmp_path / "work") == [4, 8, 12]


def test_params_that_are_not_finite_are_not_saved(run_plain, tmp_path):
    text = """

class Silent(Run):
    def update(self, state, batch, rngs):
        new, _ = super().update(state, batch, rngs)
        scale = jax.numpy.where(state.step == 2, jax.numpy.inf, 1.0)
        return new.replace(params=jax.tree.map(lambda x: x * scale, new.params)), {}


Run = Silent
"""
    code, _, err = run_plain("--config.checkpoint_every=1", source=text)
    assert code == 3
    assert "step 3: these are not finite: params/batch_norm/offset" in said(err)
    assert saved(tmp_path / "work") == [1, 2]


def test_a_skipped_step_moves_only_the_clock(tiny, drive):
    class Bad(tiny.Tiny):
        def gradients(self, state, batch, rngs):
            grads, network_state, metrics = super().gradients(state, batch, rngs)
            bad = (state.step == 2) & (jax.lax.axis_index("devices") == 3)
            grads = jax.tree.map(lambda g: jnp.where(bad, jnp.nan, g), grads)
            return grads, network_state, metrics

    config = tiny.get_config("exact")
    config.on_nonfinite = "skip"
    config.ema_decay = 0.9
    states, metrics = drive(Bad(config), 4)
    before, after, later = states[2:5]
    for name in ("params", "network_state", "opt_state", "extras"):
        old, new, last = (jax.tree.leaves(getattr(state, name)) for state in (before, after, later))
        for a, b in zip(old, new, strict=True):
            np.testing.assert_array_equal(a, b)
        assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(new, last, strict=True))
        assert all(np.isfinite(leaf).all() for leaf in last)
    assert (int(before.step), int(after.step)) == (2, 3)
    assert np.asarray(before.rng).tolist() != np.asarray(after.rng).tolist()
    assert metrics[2]["loss"] == 0.0
    assert metrics[3]["loss"] > 0


def test_skipped_steps_are_logged_and_the_run_goes_on(run_plain, tmp_path, log_lines, caplog):
    code, _, err = run_plain("--config.on_nonfinite=skip", source=source())
    assert code == 0, err
    assert "skipped 1 of 6 steps, the first at step 14: the loss and the gradient" in caplog.text
    lines = log_lines(tmp_path / "work")
    assert [line["skipped"] for line in lines] == [0, 0, 1, 0]
    assert all(math.isfinite(line["loss"]) for line in lines)


@pytest.mark.parametrize("limit, code", [(4, 3), (5, 0)])
def test_too_many_skipped_in_a_row_stop_the_run_also_over_windows_and_starts(
    run_plain, tmp_path, limit, code
):
    flags = ["--config.on_nonfinite=skip", f"--config.max_skipped={limit}", "--config.bad=(10,14)"]
    # Steps 11 and 12 are the end of a log window, 13 and 14 the beginning of the next.
    assert run_plain(*flags, "--config.stop_after=13", source=source())[0] == 0
    got, _, err = run_plain(*flags, source=source())
    assert got == code
    if code:
        assert "4 steps in a row were skipped (config.max_skipped)" in said(err)
        assert saved(tmp_path / "work") == [4, 8, 12, 13]


def test_skip_is_refused_where_nothing_says_what_is_bad(run_plain, check_refused):
    text = """

class Silent(Run):
    def update(self, state, batch, rngs):
        return super().update(state, batch, rngs)[0], {}


Run = Silent
"""
    refused = run_plain("--config.on_nonfinite=skip", source=text)
    check_refused(refused, "config.on_nonfinite='skip' would do nothing", "Silent.update")


def tallied(flags):
    tally = jnp.zeros(nonfinite.SIZE)
    for flag in flags:
        found = nonfinite.find({"loss": jnp.where(flag, jnp.nan, 0.0)})
        tally = nonfinite.note(tally, found)
    return np.asarray(tally)


def longest_run(flags):
    return max((sum(1 for _ in run) for bad, run in itertools.groupby(flags) if bad), default=0)


@pytest.mark.parametrize("seed", range(20))
def test_runs_of_bad_steps_are_counted_over_windows(seed):
    rng = np.random.default_rng(seed)
    flags = (rng.random(24) < 0.7).tolist()
    cuts = sorted(rng.choice(np.arange(1, 24), 4, replace=False).tolist())
    windows = [flags[a:b] for a, b in itertools.pairwise([0, *cuts, 24])]
    longest = longest_run(flags)
    for limit, stops in ((longest, True), (longest + 1, False)):
        judge = nonfinite.Judge("skip", limit, [])
        begin, stopped = 0, False
        for window in windows:
            try:
                skipped = judge.close(tallied(window), begin)
            except NonFinite:
                stopped = True
                break
            assert skipped == sum(window)
            begin += len(window)
        assert stopped == stops
