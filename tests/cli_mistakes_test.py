"""The command line: mistakes in an experiment, found as it is traced or while it trains."""

import pytest

from haikutrain.checkpoint import Checkpointer

PLAIN_UPDATE = """
class Run(Base):
    def update(self, state, batch, rngs):
        network = hk.transform_with_state(lambda batch: self.loss(batch, True)[0].mean())

        def loss(params):
            return network.apply(params, state.network_state, next(rngs), batch)

        (_, network_state), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        grads, network_state = haikutrain.pmean((grads, network_state))
        updates, opt_state = self.optimizer().update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        state = state.replace(params=params, network_state=network_state, opt_state=opt_state)
        return state, {"norm": optax.tree.norm(grads)}
"""


def loss(result):
    return f"""
class Run(Base):
    def loss(self, batch, is_training):
        losses, metrics = super().loss(batch, is_training)
        return {result}
"""


def data(dataset, name="train_data"):
    return f"""
class Run(Base):
    def {name}(self):
        return {dataset}
"""


def update(result):
    return f"""
class Run(Base):
    def update(self, state, batch, rngs):
        new, metrics = super().update(state, batch, rngs)
        return {result}
"""


HALF_INIT = """
class Run(Base):
    def init(self, rngs, batch):
        state = super().init(rngs, batch)
        half = jax.tree.map(lambda x: x.astype('bfloat16'), state.network_state)
        return state.replace(network_state=half)
"""

OTHER_EVALUATE = """
class Run(Base):
    def evaluate(self, state, batch, rngs):
        return {"pairs": np.zeros((3, 2))}
"""

FEW = "ArrayDataset(arrays(20), self.config.batch_size)"
PRECISION = "params=float32,compute=bfloat16,output=float32"

MISTAKES = {
    "best_metric": (
        "",
        ["--config.best_metric=acuracy"],
        ["config.best_metric='acuracy'", "eval/accuracy, eval/loss"],
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
        loss("losses, {'both': np.zeros((2, 2))}"),
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
    "no dataset": (
        data("arrays(8)['x'].sum()"),
        [],
        ["train_data", "float32", "batch(step, rows)"],
    ),
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
        "        return {'x': arrays(8)['x'], 'label': arrays(7)['label']}\n" + data("Rows()"),
        [],
        ["'x': 8", "'label': 7"],
    ),
    "network state in half precision": (
        HALF_INIT,
        [f"--config.precision={PRECISION}"],
        ["config.precision", "batch_norm/~/mean_ema/average is bfloat16", "float32"],
    ),
    "state of another dtype": (
        update("new.replace(params=jax.tree.map(lambda x: x.astype('float16'), new.params)), {}"),
        [],
        ["Run.update", "params/linear/w was float32[3,4] and is float16[3,4]", "params/linear_1/b"],
    ),
    "state of another structure": (
        update("new.replace(network_state={**new.network_state, 'own': np.zeros(2)}), {}"),
        [],
        ["Run.update", "network_state/own was absent and is float32[2]"],
    ),
    "state alone": (update("new"), [], ["Run.update must return (state, metrics)"]),
    "metrics that are no scalars": (
        update("new, {'each': np.zeros(3)}"),
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
    run_plain, check_refused, tmp_path, source, flags, expected
):
    check_refused(run_plain(*flags, source=source), *expected)
    assert not any(path.is_file() for path in (tmp_path / "work").rglob("*"))


LATER = '''
class Data:
    """Three good batches, and what comes then."""

    def __iter__(self):
        return Position()


class Position:
    place = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.place += 1
        if self.place == 4:
            THEN
        return arrays(8)

    def get_state(self):
        return self.place

    def set_state(self, place):
        self.place = place
'''


@pytest.mark.parametrize(
    "then, expected",
    [
        ("raise StopIteration", ["train_data ended after 3 batches", "repeat"]),
        ("return arrays(16)", ["16 rows", "at step 3", "at first 8"]),
        ("return {**arrays(8), 'x': np.zeros((8, 3), np.int8)}", ["int8[3]", "float32[3]"]),
    ],
)
def test_mistake_found_at_step_4_ends_the_run_and_leaves_checkpoint_2(
    run_plain, log_lines, tmp_path, then, expected
):
    code, out, err = run_plain(source=LATER.replace("THEN", then) + data("Data()"))
    assert (code, out) == (2, "")
    *before, last = err.splitlines()
    assert last.startswith("haikutrain: error: ")
    assert all(part in last for part in expected)
    assert not any("rror" in line for line in before)
    checkpoints = tmp_path / "work" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["2"]
    assert Checkpointer(checkpoints, read_only=True).read(2).data == 2
    assert [line["step"] for line in log_lines(tmp_path / "work")] == [1, 2]
