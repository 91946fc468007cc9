"""A check of single steps and of the data: each broken experiment is caught, and only by its row.

The experiments are in `tests/broken/`, each a few lines on top of `sound.py`, which is not accused.
What takes a process of its own is in `check_test.py`.
"""

import pathlib

import pytest

from haikutrain import UsageError, check, check_data, check_replicas, check_update, config_file
from haikutrain.check_evaluation import EVALUATION
from haikutrain.check_table import BROKEN

FOLDER = pathlib.Path(__file__).parent / "broken"

# What the row says: the leaf, field or line that it is about, and the likely cause.
STEPS = {
    "integer_params": (check_update.PARAMS, "params/~/scale is int32[]", "cannot train integers"),
    "layer_ignored": (
        check_update.GRADIENTS,
        "params/ignored/b, params/ignored/w had a gradient of 0",
        "a layer whose output is ignored",
        "haikutrain.freeze",
    ),
    "gradient_stopped": (
        check_update.GRADIENTS,
        "params/behind/b, params/behind/w had a gradient of 0",
        "stop_gradient",
    ),
    "not_finite": (
        check_update.GRADIENTS,
        "step 3: the gradient of params/",
        "is not finite",
        "division by 0",
    ),
    "rate_zero": (check_update.CHANGES, "changed nothing", "its learning rate is 0"),
    "not_applied": (
        check_update.CHANGES,
        "the optimizer changed params/batch_norm/offset",
        "the new params are not in the state that update returns",
    ),
    "state_dropped": (
        check_update.STATE,
        "network_state/batch_norm/~/mean_ema/average",
        "did not change",
        "the network's new state is dropped",
    ),
    "state_afresh": (
        check_update.STATE,
        "network_state/batch_norm/~/mean_ema/counter rose by 1, 0, 0, 0",
        "a state made anew",
    ),
    "gradients_not_averaged": (
        check_replicas.REPLICAS,
        "another gradient on each device: params/batch_norm/offset",
        "average the gradients",
    ),
    "state_not_averaged": (
        check_replicas.REPLICAS,
        "network_state/batch_norm/~/mean_ema/average",
        "is not the same on all devices",
        "haikutrain.pmean",
    ),
    "metrics_not_averaged": (
        check_replicas.REPLICAS,
        "the metric accuracy, loss is not the same on all devices",
        "average metrics",
    ),
    "one_key": (
        check_replicas.RANDOM,
        "one_key.py:{line}: the same numbers at every step and on every device",
        "the key is a constant",
    ),
    "own_sequence": (
        check_replicas.RANDOM,
        "own_sequence.py:{line}: the same numbers at every step and on every device",
        "hk.PRNGSequence(0)",
    ),
    "same_on_devices": (
        check_replicas.RANDOM,
        ": the same numbers on every device",
        "one key for all devices",
    ),
    "same_at_steps": (
        check_replicas.RANDOM,
        ": the same numbers at every step",
        "the key does not advance",
    ),
    "key_broadcast": (
        check_replicas.RANDOM,
        "equal rows have the loss",
        "on each of 4 devices",
        "from rngs in update",
    ),
    "state_on_self": (
        check_update.PURE,
        "self.average holds a traced value",
        "keep it in the TrainState",
    ),
    "counter_on_self": (
        check_update.PURE,
        "it is another program",
        "it changed self.calls",
        "keep it in the TrainState",
    ),
    "host_random": (check_update.PURE, "it is another program", "np.random"),
    "evaluation_trains": (
        EVALUATION,
        "eval/loss of an example changes with the other examples",
        "batch_norm/~/mean_ema/average",
        "is_training=False",
    ),
}
DATA = {
    "data_restarts": (
        check_data.RESUMES,
        "it goes on with another id, label, x",
        "set_state ignores the position",
    ),
    "data_not_pure": (
        check_data.RESUMES,
        "asked for again, has another x",
        "a function of its arguments alone",
    ),
    "buffer_reused": (
        check_data.BUFFERS,
        "id of batch 0, label of batch 0, x of batch 0",
        "writes each batch into the same array",
    ),
    "rows_by_part": (
        check_data.SPLIT,
        "id, label, x of batch 0",
        "asked for in 2 parts",
        "choose all rows of the batch first",
    ),
    "rows_repeated": (check_data.EPOCH, "id: of 8 examples 0 came 2 times", "permutation"),
    "rows_left_out": (check_data.EPOCH, "9, 15 not at all", "the last rows, which fill no batch"),
}


def load(kind):
    loaded = config_file.load(str(FOLDER / f"{kind}.py"))
    return loaded.experiment_class(loaded.config)


def assert_accused(kind, rows, promise, *words):
    source = (FOLDER / f"{kind}.py").read_text().splitlines()
    line = next((i for i, text in enumerate(source, 1) if "hk.dropout(" in text), None)
    (row,) = (row for row in rows if row.result == BROKEN)
    assert row.what == promise
    for word in words:
        assert word.format(line=line) in f"{row.where}; {row.do}"


def test_a_sound_experiment_is_not_accused():
    experiment = load("sound")
    rows = [*check.Looked(experiment).rows(), *check_data.data_rows(experiment)]
    assert {row.result for row in rows} == {"held", "measured"}


@pytest.mark.parametrize("kind", STEPS)
def test_single_steps_accuse(kind):
    assert_accused(kind, check.Looked(load(kind)).rows(), *STEPS[kind])


def test_what_any_start_refuses_is_refused_in_its_words():
    with pytest.raises(UsageError, match=r"mean_ema/counter was int32.* and is float32"):
        list(check.Looked(load("counter_averaged")).rows())


@pytest.mark.parametrize("kind", DATA)
def test_the_data_is_accused(kind):
    assert_accused(kind, check_data.data_rows(load(kind)), *DATA[kind])
