"""How a run begins: the experiment made ready, and its state restored or made."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from absl import logging

from haikutrain import compiled, devices, leaves, metrics, precision, processes
from haikutrain import config as configs
from haikutrain.checkpoint import Checkpointer, encode
from haikutrain.errors import CheckpointMissing, UsageError
from haikutrain.eval_feed import EvalFeed
from haikutrain.experiment import Experiment
from haikutrain.feed import TrainFeed
from haikutrain.programs import Programs
from haikutrain.shared_reading import Reader, find_together, restore_chosen, together
from haikutrain.train_state import TrainState
from haikutrain.workdir import experiment_name, same_experiment

_WEIGHTS = ("params", "network_state")

T = TypeVar("T")


class Task:
    """An experiment made ready to run: its config checked, its data opened, its programs traced.

    Nothing is compiled and nothing written here.

    Raises:
      UsageError: a mistake in the config, the data or the experiment.
    """

    def __init__(self, experiment: Experiment):
        if not isinstance(experiment, Experiment):
            raise UsageError(
                f"{experiment!r} is no experiment; make one of its class and a config, such as "
                "MyExperiment(get_config())"
            )
        config = experiment.config
        configs.validate(config, device_count=devices.device_count())
        precision.policy(config.precision)
        compiled.keep(config.compilation_cache)
        self.experiment = experiment
        self.config = config
        self.config_json = configs.to_json(config)
        self.name = experiment_name(type(experiment))
        self.feed = TrainFeed(experiment.train_data(), config.batch_size)
        self.programs = Programs(experiment, self.feed.first)
        self.eval_feeds = _eval_feeds(experiment)
        for split, feed in self.eval_feeds.items():
            self.programs.check_exact(split, feed.shapes, padded=feed.padded)
        self.best_metric = self._best_metric()
        self._fingerprints = self._agree()

    def _agree(self) -> list[dict[str, Any]]:
        """The fingerprints of the training data of all processes, which must do the same."""
        if jax.process_count() != processes.count():
            raise UsageError(
                "these processes were not joined by haikutrain: call haikutrain.processes.start "
                "instead of jax.distributed.initialize, and haikutrain.processes.leave at the end"
            )
        fingerprint = self.feed.fingerprint()
        same = {
            "the experiment": self.name,
            **{f"config.{name}": value for name, value in self.config_json.items()},
            "the number of devices": jax.local_device_count(),
            "eval_data's splits": list(self.eval_feeds),
            "train_data's rows": [fingerprint["protocol"], fingerprint["row"]],
        }
        return processes.agree(same, fingerprint)

    @property
    def parameters(self) -> int:
        """How many numbers are in `params`."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.programs.state.params))

    def check_update(self) -> None:
        """Traces the update: raises UsageError for what it does wrong."""
        encode(self.feed.position)
        self.own_hooks()
        self.feed.check_length(self.config.stop_after or self.config.num_steps)
        self.programs.trace_update()

    def own_hooks(self) -> list[Any]:
        """The experiment's own hooks; raises UsageError if that is no list of functions."""
        hooks = self.experiment.hooks()
        if not isinstance(hooks, list | tuple) or not all(map(callable, hooks)):
            raise UsageError(
                f"{type(self.experiment).__name__}.hooks returned {hooks!r}; return a list of "
                "functions of a haikutrain.StepInfo"
            )
        return list(hooks)

    def check_rows(self) -> None:
        """Raises UsageError if no split has values that are kept row by row."""
        if not any(self.programs.keeps_rows(feed.shapes) for feed in self.eval_feeds.values()):
            raise UsageError(
                "there are no predictions to write: return some among the metrics of loss or "
                'evaluate, as {"prediction": haikutrain.Rows(logits.argmax(-1))}'
            )

    def _best_metric(self) -> str | None:
        """`config.best_metric` as "split/name", checked against what evaluation returns."""
        wanted = self.config.best_metric
        names = [
            f"{split}/{name}"
            for split, feed in self.eval_feeds.items()
            for name in self.programs.evaluate_names(feed.shapes)
        ]
        if wanted is None or wanted in names:
            return wanted
        alone = f"{next(iter(self.eval_feeds), '')}/{wanted}"
        if len(self.eval_feeds) == 1 and alone in names:
            return alone
        if type(self.experiment).report is not Experiment.report:
            # It may be a number of the report's, which only an evaluation can tell.
            return wanted if "/" in wanted or len(self.eval_feeds) != 1 else alone
        raise _not_returned(wanted, names)

    def check_judged(self, found: Mapping[str, float]) -> None:
        """Raises UsageError if the metrics that a save is judged by lack `config.best_metric`."""
        if self.best_metric is not None and self.best_metric not in found:
            raise _not_returned(self.config.best_metric, found)

    def meta(self, window: Mapping[str, Any], ended: str | None) -> dict[str, Any]:
        """What a checkpoint says about its run."""
        return {
            "experiment": self.name,
            "config": self.config_json,
            "data": self._fingerprints[0],
            "data_of_others": self._fingerprints[1:],
            "window": window,
            "ended": ended,
            "devices": devices.device_count(),
        }


def _not_returned(wanted: str, names: Iterable[str]) -> UsageError:
    return UsageError(
        f"config.best_metric={wanted!r} is not what evaluation returns; it returns "
        f"{', '.join(names) or 'nothing, for there is no eval_data'}"
    )


def _eval_feeds(experiment: Experiment) -> dict[str, EvalFeed]:
    splits = experiment.eval_data()
    if not isinstance(splits, Mapping):
        splits = {"eval": splits}
    if any(isinstance(part, np.ndarray | jax.Array) for part in splits.values()):
        raise UsageError(
            "eval_data returned a dict of arrays, and a dict is of datasets by split name; put "
            "the arrays into a haikutrain.ArrayDataset"
        )
    if not all(isinstance(split, str) and split for split in splits):
        raise UsageError(f"eval_data has splits named {list(splits)}; names must be strings")
    if "train" in splits:
        raise UsageError("eval_data has a split named 'train', which the training log uses")
    size = experiment.config.batch_size
    return {split: EvalFeed(dataset, split, size) for split, dataset in splits.items()}


@dataclasses.dataclass
class Start:
    """Where a start begins and ends."""

    state: TrainState
    """On the devices."""
    step: int
    """The state's step."""
    stop: int
    """The step at which this start ends: num_steps or stop_after."""
    zeros: jax.Array
    """An empty window's sums."""
    position: Any = None
    """The data iterator's state; None to begin where it stands."""
    window: tuple[jax.Array, int] | None = None
    """The open window's sums and count."""
    skipped_before: int = 0
    """How many steps in a row were skipped just before the open window."""
    ended: str | None = None
    """If there is nothing to do: why."""


def restore_or_init(task: Task, checkpointer: Reader) -> Start:
    """The newest good checkpoint of the run's own, else `config.restore_from`, else a new state.

    Raises:
      UsageError: the checkpoint does not fit the experiment; the message names each difference.
      CheckpointDamaged: there are checkpoints, and not one is good.
      CheckpointUnreadable: the newest cannot be read now.
    """
    resumed = checkpointer.newest_good(lambda step: _resumed(task, checkpointer, step))
    if resumed is not None:
        return resumed
    if task.config.restore_from is not None:
        return _restored_from(task, task.config.restore_from)
    logging.info("starting a new run of %d steps", task.config.num_steps)
    log = checkpointer.directory.with_name("metrics.jsonl")
    if log.exists() and log.stat().st_size:
        logging.warning(
            "%s has no checkpoint, though %s is of an earlier start here: it is begun anew",
            checkpointer.directory,
            log.name,
        )
    # After a restore there is one program alone to compile.
    steps = task.config.steps_per_call
    task.programs.compile_ahead(steps, task.feed.group(steps), task.feed.resident)
    return _start(task, task.programs.init(), 0)


def _start(task: Task, state: TrainState, step: int) -> Start:
    config = task.config
    stop = min(config.num_steps, config.stop_after or config.num_steps)
    zeros = devices.place(metrics.empty_window(task.programs.metric_names))
    return Start(state, step, stop, zeros)


def _resumed(task: Task, checkpointer: Reader, step: int) -> Start:
    meta = checkpointer.read_meta(step)
    changed = _check_same_run(task, meta)
    start = _restored(task, checkpointer, step)
    start.ended = _ended(task, meta, start)
    if start.ended is None:
        logging.info("resuming at step %d from %s", step, checkpointer.directory)
    for change in changed:
        logging.warning("changed since the checkpoint was written: %s", change)
    return start


def _restored(task: Task, checkpointer: Reader, step: int) -> Start:
    restored = checkpointer.restore(step, task.programs.state)
    start = _start(task, devices.place(restored.state), step)
    start.position = task.feed.own(restored.data)
    window = restored.meta["window"]
    if window["names"] == task.programs.metric_names:
        sums = np.array(window["sums"], np.float32)
        start.window = devices.place(sums), window["count"]
    start.skipped_before = window["skipped_before"]
    return start


def _restored_from(task: Task, path: str) -> Start:
    directory, step = find_together(path)
    source = together(Checkpointer(directory, read_only=True))
    read = _resumed if task.config.restore_only == "all" else _with_weights
    chosen = "latest" if step is None else step
    return restore_chosen(source, chosen, lambda step: read(task, source, step))


def _with_weights(task: Task, source: Reader, step: int) -> Start:
    logging.info("taking weights from checkpoint %d of %s", step, source.directory)
    if type(task.experiment).warm_start is not Experiment.warm_start:
        saved = source.read(step).state
        state = task.experiment.warm_start(task.programs.init(), saved)
        _check_warm(task, state)
    else:
        try:
            weights = source.restore(step, task.programs.state, fields=_WEIGHTS).state
        except CheckpointMissing:
            raise
        except UsageError as error:
            raise UsageError(f"{error}; to take a part, redefine warm_start") from error
        state = task.programs.init()
        state = state.replace(**{name: getattr(weights, name) for name in _WEIGHTS})
    return _start(task, devices.place(task.programs.with_fresh_extras(state)), 0)


def _check_warm(task: Task, state: TrainState) -> None:
    tables = (
        {path: leaves.describe(path, leaf) for path, leaf in leaves.by_path(tree).items()}
        for tree in (state, task.programs.state)
    )
    if found := leaves.differences(*tables):
        raise UsageError(
            f"warm_start returned a state that is not the experiment's: {'; '.join(found)}"
        )


def _check_same_run(task: Task, meta: Mapping[str, Any]) -> list[str]:
    """Raises UsageError for what must not change; returns what has changed besides."""
    if not same_experiment(meta["experiment"], task.name):
        raise UsageError(
            f"the checkpoint is of a run of {meta['experiment']}, and this is {task.name}; give "
            "another --workdir, or take the weights alone (restore_from, restore_only='weights')"
        )
    changed = [f"config.{change}" for change in configs.check_same_run(meta["config"], task.config)]
    before, now = _fingerprint(meta), task.feed.fingerprint()
    if now["protocol"] == "by step" and "workers" in now:  # They only work ahead.
        was, workers = before.get("workers"), now.pop("workers")
        if was != workers:
            changed.append(f"worker processes of train_data: {was} -> {workers}")
    changes = [
        f"{name} was {before.get(name)} and is {now[name]}"
        for name in now
        if before.get(name) != now[name]
    ]
    if "processes" in now and before.get("processes") != now["processes"]:
        changes.append(
            "the position of an iterator is lost on another number of processes, and that of a "
            "grain.MapDataset, or of any dataset by step, is not"
        )
    if changes:
        raise UsageError(
            f"train_data has changed since the checkpoint was written, so that the run could not "
            f"go on as it was: {'; '.join(changes)}; put it back, or start in another workdir "
            "(restore_from takes the weights along)"
        )
    return changed


def _fingerprint(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    """That of this process's part of the data; where there was no such process, of the first's."""
    others = meta.get("data_of_others", [])
    own = processes.index()
    return others[own - 1] if 0 < own <= len(others) else meta["data"]


def _ended(task: Task, meta: Mapping[str, Any], start: Start) -> str | None:
    num_steps = task.config.num_steps
    if start.step >= num_steps:
        return f"is finished: step {start.step} of {num_steps}; raise num_steps to train on"
    if meta["ended"] is not None and num_steps <= meta["config"]["num_steps"]:
        return f"has ended at step {start.step} ({meta['ended']}); raise num_steps to train on"
    if start.step >= start.stop:
        return f"is at step {start.step}, and stop_after is {start.stop}; raise it to train on"
    return None
