"""Experiment: the order of an update's parts, accumulation, `step()`, what a loss may return."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import haikutrain
from haikutrain.eval_feed import EvalFeed
from haikutrain.programs import Programs

ROWS = 16


def arrays(examples=48):
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(examples, 3)).astype(np.float32),
        "y": rng.normal(size=examples).astype(np.float32),
    }


class Line(haikutrain.Experiment):
    """Least squares, y = x w, with a moving average of x and a count of calls in its state."""

    def loss(self, batch, is_training):
        w = hk.get_parameter("w", [3], init=jnp.ones)
        seen = hk.get_state("seen", [3], init=jnp.zeros)
        hk.set_state("seen", 0.5 * seen + 0.5 * batch["x"].mean(axis=0))
        hk.set_state("calls", hk.get_state("calls", [], jnp.int32, init=jnp.zeros) + 1)
        errors = batch["x"] @ w - batch["y"]
        return jnp.square(errors), {"error": jnp.abs(errors), "mean_x": batch["x"].mean()}

    def optimizer(self):
        rate = haikutrain.scale_by_learning_rate(lambda step: 0.1 / (1 + step))
        return optax.chain(optax.trace(0.9), rate)

    def train_data(self):
        return haikutrain.ArrayDataset(arrays(), self.config.batch_size, seed=0)


def config(**changes):
    result = haikutrain.base_config()
    result.update(experiment="here:Line", num_steps=4, batch_size=ROWS, log_every=1)
    result.update(changes)
    return result


def close(got, wanted, rtol=1e-5):
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=rtol, atol=1e-6)


# --- the update ------------------------------------------------------------------------------


def test_an_update_averages_clips_steps_and_averages_weights_in_this_order(drive):
    """Against NumPy, in float64, over five steps."""
    clip, decay = 0.5, 0.75
    task = Line(config(grad_clip_norm=clip, ema_decay=decay))
    states, metrics = drive(task, steps=5)
    w, momentum, seen = np.ones(3), np.zeros(3), np.zeros(3)
    averaged_w, averaged_seen = w, seen
    clipped = 0
    for step in range(5):
        batch = task.train_data().batch(step)
        x, y = batch["x"].astype(np.float64), batch["y"].astype(np.float64)
        errors = x @ w - y
        grad = 2 * (errors[:, None] * x).mean(axis=0)
        norm = np.linalg.norm(grad)
        clipped += norm > clip
        momentum = 0.9 * momentum + grad * min(1, clip / norm)
        w = w - 0.1 / (1 + step) * momentum
        seen = 0.5 * seen + 0.5 * x.mean(axis=0)
        averaged_w = decay * averaged_w + (1 - decay) * w
        averaged_seen = decay * averaged_seen + (1 - decay) * seen
        state = states[step + 1]
        ema = state.extras["ema"]
        close(state.params["~"]["w"], w)
        close(state.network_state["~"]["seen"], seen)
        close(ema["params"]["~"]["w"], averaged_w)
        close(ema["network_state"]["~"]["seen"], averaged_seen)
        # Counters are taken as they are.
        assert state.network_state["~"]["calls"] == ema["network_state"]["~"]["calls"] == step + 1
        assert metrics[step] == pytest.approx(
            {
                "loss": np.square(errors).mean(),
                "error": np.abs(errors).mean(),
                "mean_x": x.mean(),
                "grad_norm": norm,
                "learning_rate": 0.1 / (1 + step),
            },
            rel=1e-4,
            abs=1e-6,
        )
    assert clipped > 0
    close(haikutrain.averaged(state).params["~"]["w"], averaged_w)


def test_without_clipping_and_averages_there_are_none(drive):
    task = Line(config())
    states, metrics = drive(task, steps=1)
    batch = task.train_data().batch(0)
    errors = batch["x"].sum(axis=1) - batch["y"]
    grad = 2 * (errors[:, None] * batch["x"]).mean(axis=0)
    close(states[1].params["~"]["w"], 1 - 0.1 * grad)
    assert metrics[0]["grad_norm"] == pytest.approx(np.linalg.norm(grad), rel=1e-5)
    assert metrics[0]["grad_norm"] > 0.5
    assert states[1].extras == {}
    assert haikutrain.averaged(states[1]) is states[1]


def test_evaluation_uses_the_averaged_weights():
    task = Line(config(ema_decay=0.5))
    programs = Programs(task, task.train_data().batch(0))
    state = programs.init()
    average = {"params": {"~": {"w": np.full(3, 5, "f4")}}, "network_state": state.network_state}
    state = state.replace(extras={"ema": haikutrain.devices.place(average)})
    feed = EvalFeed(haikutrain.ArrayDataset(arrays(), ROWS), "test", ROWS)
    sums = programs.evaluate(state, "test", next(feed.items()))["sums"]
    x, y = arrays()["x"][:ROWS], arrays()["y"][:ROWS]
    assert float(sums["loss"]) == pytest.approx(np.square(5 * x.sum(axis=1) - y).sum(), rel=1e-5)


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulated_parts_are_one_big_batch(drive, parts):
    one, metrics_of_one = drive(Line(config(grad_clip_norm=0.5)), steps=4)
    many, metrics = drive(Line(config(grad_clip_norm=0.5, accumulate_steps=parts)), steps=4)
    for step in range(4):
        close(many[step + 1].params["~"]["w"], one[step + 1].params["~"]["w"], rtol=1e-6)
        assert metrics[step] == pytest.approx(metrics_of_one[step], rel=1e-5, abs=1e-6)
        assert int(many[step + 1].step) == step + 1
        assert int(many[step + 1].network_state["~"]["calls"]) == parts * (step + 1)


def test_accumulation_hands_the_network_state_from_part_to_part(drive):
    task = Line(config(accumulate_steps=2))
    states, _ = drive(task, steps=1)
    # Device d has rows 4 d to 4 d + 3, the first half first.
    x = task.train_data().batch(0)["x"].reshape(4, 2, 2, 3).mean(axis=2)
    close(states[1].network_state["~"]["seen"], (0.25 * x[:, 0] + 0.5 * x[:, 1]).mean(axis=0))


class Two(Line):
    """Two optimizers, by the public helpers: w by `loss`, and a second parameter by itself."""

    def init(self, rngs, batch):
        state = super().init(rngs, batch)
        return state.replace(network_state={**state.network_state, "bias": jnp.zeros(())})

    def update(self, state, batch, rngs):
        network_state = dict(state.network_state)
        bias = network_state.pop("bias")
        own = state.replace(network_state=network_state)
        grads, network_state, metrics = self.gradients(own, batch, rngs)
        new, metrics = haikutrain.apply_gradients(
            own, grads, network_state=network_state, optimizer=self.optimizer(), metrics=metrics
        )
        bias = bias + haikutrain.pmean(batch["y"].mean())
        return new.replace(network_state={**new.network_state, "bias": bias}), metrics


def test_a_redefined_update_gets_the_config_through_the_helpers(drive):
    changes = {"grad_clip_norm": 0.5, "ema_decay": None, "accumulate_steps": 2}
    base, _ = drive(Line(config(**changes)), steps=2)
    two, _ = drive(Two(config(**changes)), steps=2)
    assert haikutrain.digest(two[2].params) == haikutrain.digest(base[2].params)
    dataset = Line(config()).train_data()
    means = [dataset.batch(step)["y"].mean() for step in (0, 1)]
    close(two[2].network_state["bias"], sum(means))


class Plain(Line):
    """An update that uses no helper at all, and shows nothing."""

    def optimizer(self):
        return optax.sgd(0.1)

    def update(self, state, batch, rngs):
        return state, {}


@pytest.mark.parametrize(
    "field, value, helper",
    [
        ("grad_clip_norm", 1.0, "apply_gradients"),
        ("ema_decay", 0.9, "apply_gradients"),
        ("accumulate_steps", 2, "Experiment.gradients"),
        ("precision", "params=float32,compute=bfloat16,output=float32", "Experiment.gradients"),
    ],
)
def test_a_field_that_a_redefined_update_would_ignore_is_refused(drive, field, value, helper):
    with pytest.raises(haikutrain.UsageError, match=rf"config\.{field}=.* do nothing: .*{helper}"):
        drive(Plain(config(**{field: value})), steps=1)


# --- step() ----------------------------------------------------------------------------------


class Stepping(Line):
    """Shows the step that each function saw."""

    def loss(self, batch, is_training):
        step = haikutrain.step()
        assert step.dtype == jnp.int32
        assert step.shape == ()
        w = hk.get_parameter("w", [], init=lambda shape, dtype: 100.0 + step)
        return w * 0 * batch["y"], {"saw": step}


@pytest.mark.parametrize("per_call", [1, 3])
def test_step_is_0_at_init_and_counts_the_batches_before(drive, per_call):
    states, metrics = drive(Stepping(config()), steps=6, per_call=per_call)
    assert float(states[0].params["~"]["w"]) == 100.0
    saw = [values["saw"] for values in metrics]
    assert saw == ([0, 1, 2, 3, 4, 5] if per_call == 1 else [0 + 1 + 2, 3 + 4 + 5])
    task = Stepping(config())
    programs = Programs(task, task.train_data().batch(0))
    state = haikutrain.devices.place(states[-1])
    feed = EvalFeed(haikutrain.ArrayDataset(arrays(), ROWS), "test", ROWS)
    result = programs.evaluate(state, "test", next(feed.items()))
    assert float(result["sums"]["saw"] / result["count"]) == 6


def test_step_outside_of_an_experiments_functions_is_refused():
    with pytest.raises(haikutrain.UsageError, match=r"state\.step"):
        haikutrain.step()


# --- what a loss may return ------------------------------------------------------------------


class Returning(Line):
    """Its loss returns what `make` makes of (losses [B], batch)."""

    make = staticmethod(lambda losses, batch: losses)

    def loss(self, batch, is_training):
        losses, _ = super().loss(batch, is_training)
        return self.make(losses, batch)


def returning(make, **changes):
    return type("Returning", (Returning,), {"make": staticmethod(make)})(config(**changes))


def test_losses_may_be_one_an_example_or_the_batchs_mean(drive):
    each, metrics = drive(returning(lambda losses, batch: (losses, {})), steps=3)
    mean, metrics_of_mean = drive(returning(lambda losses, batch: (losses.mean(), {})), steps=3)
    close(mean[3].params["~"]["w"], each[3].params["~"]["w"], rtol=1e-6)
    for one, other in zip(metrics, metrics_of_mean, strict=True):
        assert one == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda losses, batch: losses, "returned a .*Tracer; return"),
        (lambda losses, batch: (losses, [1]), "returned a tuple; return"),
        (lambda losses, batch: (losses, {"loss": losses}), r"names \['loss'\] are the framework's"),
        (
            lambda losses, batch: (losses, {"step": losses, "a": losses, "grad_norm": losses}),
            r"names \['grad_norm', 'step'\] are the framework's",
        ),
        (lambda losses, batch: (losses, {"learning_rate": losses}), "learning_rate"),
        (lambda losses, batch: (losses[:2], {}), r"'loss' has shape \[2\]; .* \[4\], .* \[\]"),
        (lambda losses, batch: (losses[:, None], {}), r"'loss' has shape \[4, 1\]"),
        (lambda losses, batch: (losses, {"x": batch["x"]}), r"'x' has shape \[4, 3\]"),
    ],
)
def test_other_returns_are_refused(drive, make, message):
    with pytest.raises(haikutrain.UsageError, match=message):
        drive(returning(make), steps=1)


@pytest.mark.parametrize("examples, padded", [(2 * ROWS, False), (2 * ROWS - 1, True)])
def test_means_of_a_batch_are_refused_where_a_batch_is_padded(tmp_path, examples, padded):
    class Means(Line):
        def eval_data(self):
            return {"test": haikutrain.ArrayDataset(arrays(examples), ROWS)}

    task = Means(config(num_steps=1))
    if padded:
        with pytest.raises(haikutrain.UsageError, match=r"'test': \['mean_x'\] are means"):
            haikutrain.train(task, tmp_path)
    else:
        haikutrain.train(task, tmp_path)
        x = arrays(examples)["x"]
        got = haikutrain.evaluate(task, tmp_path)["test"]["mean_x"]
        assert got == pytest.approx(x.mean(), rel=1e-5)


class Silent(haikutrain.Experiment):
    def train_data(self):
        return haikutrain.ArrayDataset(arrays(), ROWS, seed=0)


@pytest.mark.parametrize(
    "methods, message",
    [
        ({}, "Silent defines no loss"),
        ({"loss": Line.loss}, r"Silent defines no optimizer\(\)"),
        ({"init": lambda self, rngs, batch: {}}, "init returned a dict; return a haikutrain.Train"),
    ],
)
def test_what_is_missing_is_named(drive, methods, message):
    with pytest.raises(haikutrain.UsageError, match=message):
        drive(type("Silent", (Silent,), methods)(config()), steps=1)


def test_metrics_of_a_redefined_update_must_be_scalars(drive):
    class Rows(Line):
        def update(self, state, batch, rngs):
            state, metrics = super().update(state, batch, rngs)
            return state, {**metrics, "rows": lax.all_gather(batch["y"].sum(), haikutrain.AXIS)}

    with pytest.raises(haikutrain.UsageError, match=r"metric 'rows' has shape \[4\]; return"):
        drive(Rows(config()), steps=1)


def test_an_update_may_have_no_metrics(drive, tmp_path, log_lines):
    states, metrics = drive(Plain(config()), steps=2)
    assert metrics == [{}, {}]
    haikutrain.train(Plain(config(num_steps=2)), tmp_path)
    assert log_lines(tmp_path) == [{"step": 1, "split": "train"}, {"step": 2, "split": "train"}]
    assert int(states[2].step) == 2
    jax.tree.map(np.testing.assert_array_equal, states[2].params, states[0].params)
