"""The command line with real runs: mistakes that only training can find, and how runs end."""

import json
import pathlib
import shutil

import pytest

from haikutrain import main
from haikutrain.checkpoint import Checkpointer
from haikutrain.checkpoint_folder import list_steps

CONFIG = '''
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

import haikutrain
from haikutrain import ArrayDataset, TrainState, apply_gradients, pmean


def get_config():
    config = haikutrain.base_config()
    config.experiment = ":Run"
    config.num_steps = 4
    config.batch_size = 8
    config.log_every = 1
    config.checkpoint_every = 2
    config.width = 4
    config.rows = 20
    return config


def arrays(rows):
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
    return {"x": x, "label": (x[:, 0] > 0).astype(np.int32)}


class Run(haikutrain.Experiment):
    def loss(self, batch, is_training):
        x = hk.Linear(self.config.width)(batch["x"])
        x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training))
        logits = hk.Linear(2)(x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses, {"accuracy": logits.argmax(-1) == batch["label"]}

    def optimizer(self):
        return optax.adam(1e-2)

    def train_data(self):
        return ArrayDataset(arrays(self.config.rows), self.config.batch_size, self.config.seed)

    def eval_data(self):
        return ArrayDataset(arrays(10), 4)


Base = Run
'''


@pytest.fixture
def run(tmp_path, capsys):
    """Runs the command, the config file ending in `source`: its exit code, stdout and stderr."""

    def command(*flags, source="", workdir=None):
        (tmp_path / "run.py").write_text(CONFIG + source)
        argv = [f"--config={tmp_path}/run.py", f"--workdir={workdir or tmp_path / 'work'}"]
        code = main.run([*argv, *flags])
        return code, *capsys.readouterr()

    return command


def contents(folder):
    """Every file below a folder, and what is in it."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_refused(result, *expected):
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("haikutrain: error: ")
    assert err.count("\n") == 1
    for part in expected:
        assert part in err


# --- mistakes in the experiment --------------------------------------------------------------

PLAIN_UPDATE = '''
class Run(Base):
    def update(self, state, batch, rngs):
        network = hk.transform_with_state(lambda batch: self.loss(batch, True)[0].mean())

        def loss(params):
            return network.apply(params, state.network_state, next(rngs), batch)

        (_, network_state), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        grads, network_state = pmean((grads, network_state))
        updates, opt_state = self.optimizer().update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        state = state.replace(params=params, network_state=network_state, opt_state=opt_state)
        return state, {"norm": optax.global_norm(grads)}
'''


def loss(result):
    return f'''
class Run(Base):
    def loss(self, batch, is_training):
        losses, metrics = super().loss(batch, is_training)
        return {result}
'''


def data(dataset, name="train_data"):
    return f'''
class Run(Base):
    def {name}(self):
        return {dataset}
'''


def update(result):
    return f'''
class Run(Base):
    def update(self, state, batch, rngs):
        new, metrics = super().update(state, batch, rngs)
        return {result}
'''


HALF_INIT = '''
class Run(Base):
    def init(self, rngs, batch):
        state = super().init(rngs, batch)
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.network_state)
        return state.replace(network_state=half)
'''

OTHER_EVALUATE = '''
class Run(Base):
    def evaluate(self, state, batch, rngs):
        return {"pairs": jnp.zeros((3, 2))}
'''

FEW = "ArrayDataset(arrays(20), self.config.batch_size)"
PRECISION = "params=float32,compute=bfloat16,output=float32"

MISTAKES = {
    "best_metric": (
        "",
        ["--config.best_metric=acuracy"],
        ["config.best_metric='acuracy'", "eval/loss, eval/accuracy"],
    ),
    "best_metric without eval_data": (
        data({}, "eval_data"),
        ["--config.best_metric=loss"],
        ["config.best_metric='loss'", "there is no eval_data"],
    ),
    "update ignores ema_decay": (
        PLAIN_UPDATE,
        ["--config.ema_decay=0.9"],
        ["config.ema_decay=0.9", "Run.update", "apply_gradients"],
    ),
    "update ignores grad_clip_norm": (
        PLAIN_UPDATE,
        ["--config.grad_clip_norm=1.0"],
        ["config.grad_clip_norm=1.0", "Run.update", "apply_gradients"],
    ),
    "update ignores precision": (
        PLAIN_UPDATE,
        [f"--config.precision={PRECISION}"],
        [f"config.precision='{PRECISION}'", "Experiment.gradients"],
    ),
    "update ignores accumulate_steps": (
        PLAIN_UPDATE,
        ["--config.accumulate_steps=2"],
        ["config.accumulate_steps=2", "Experiment.gradients"],
    ),
    "loss of two values": (loss("losses[:1], metrics"), [], ["Run.loss", "'loss'", "[1]", "[2]"]),
    "loss alone": (loss("losses"), [], ["Run.loss", "return (losses, metrics)"]),
    "metric of pairs": (
        loss("losses, {'both': jnp.zeros((2, 2))}"),
        [],
        ["Run.loss", "'both'", "[2, 2]", "[2]"],
    ),
    "metric of the framework": (
        loss("losses, {'grad_norm': losses}"),
        [],
        ["Run.loss", "['grad_norm']", "rename"],
    ),
    "iterator without a position": (
        data("(arrays(8) for _ in range(100))"),
        [],
        ["generator", "get_state and set_state", "ArrayDataset"],
    ),
    "no dataset": (data("arrays(8)['x'].sum()"), [], ["train_data", "float32", "batch(step, rows)"]),
    "finite data": (data(FEW), [], ["3 batches", "needs 4", "seed"]),
    "other batch_size": (
        data("ArrayDataset(arrays(20), 12, seed=0)"),
        [],
        ["batch_size 12", "the config 8"],
    ),
    "rows": (
        "class Rows:\n    def batch(self, step, rows):\n        return arrays(6)\n"
        + data("Rows()"),
        [],
        ["a batch of 6 rows", "batch_size=8"],
    ),
    "unequal rows": (
        "class Rows:\n    def batch(self, step, rows):\n"
        "        return {'x': arrays(8)['x'], 'label': arrays(7)['label']}\n"
        + data("Rows()"),
        [],
        ["'x': 8", "'label': 7"],
    ),
    "network state in half precision": (
        HALF_INIT,
        [f"--config.precision={PRECISION}"],
        ["config.precision", "batch_norm/~/mean_ema/average is bfloat16", "float32"],
    ),
    "state of another dtype": (
        update("new.replace(params=jax.tree.map(lambda x: x.astype(jnp.float16), new.params)), {}"),
        [],
        ["Run.update", "params/linear/w was float32[3,4] and is float16[3,4]", "params/linear_1/b"],
    ),
    "state of another structure": (
        update("new.replace(network_state={**new.network_state, 'own': jnp.zeros(2)}), {}"),
        [],
        ["Run.update", "network_state/own was absent and is float32[2]"],
    ),
    "state alone": (update("new"), [], ["Run.update must return (state, metrics)"]),
    "metrics that are no scalars": (
        update("new, {'each': jnp.zeros(3)}"),
        [],
        ["Run.update", "'each'", "[3]", "scalars"],
    ),
    "evaluation of pairs": (OTHER_EVALUATE, [], ["Run.evaluate", "'pairs'", "[3, 2]", "[1]"]),
    "split called train": (
        data("{'train': ArrayDataset(arrays(10), 4)}", "eval_data"),
        [],
        ["'train'"],
    ),
    "endless split": (
        data("{'test': ArrayDataset(arrays(10), 4, seed=1)}", "eval_data"),
        [],
        ["eval_data ('test')", "no end"],
    ),
    "restore_from nothing": ("", ["--config.restore_from=nowhere"], ["nowhere", "no checkpoint"]),
}


@pytest.mark.parametrize("source, flags, expected", MISTAKES.values(), ids=MISTAKES)
def test_mistake_of_the_experiment_is_one_line_and_nothing_is_written(
    run, tmp_path, source, flags, expected
):
    check_refused(run(*flags, source=source), *expected)
    assert not (tmp_path / "work").exists()
