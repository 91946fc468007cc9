"""The loops: train() and evaluate(). train says when; the experiment says what; hooks watch."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from absl import logging

from haikutrain import devices, evaluation, leaves, nonfinite, processes, writers
from haikutrain.checkpoint import Checkpointer
from haikutrain.console import Console
from haikutrain.errors import Stopped
from haikutrain.evaluation import Evaluations
from haikutrain.experiment import Experiment
from haikutrain.hooks import Hook, Log, StepInfo, every
from haikutrain.metrics import Window
from haikutrain.saving import Saves
from haikutrain.shared_reading import restore_chosen, together
from haikutrain.start import Start, Task, restore_or_init
from haikutrain.train_state import TrainState
from haikutrain.workdir import Workdir, check_file, write_rows


def train(
    experiment: Experiment, workdir: str | os.PathLike[str], *, overrides: Sequence[str] = ()
) -> TrainState:
    """Trains until `config.num_steps` or `config.stop_after`; resumes what is in `workdir`.

    Args:
      experiment: what to train, with its config.
      workdir: the folder of the run, created if need be.
      overrides: how the config differs from its file's, to be written down.

    Returns:
      The last state, on the devices.

    Raises:
      UsageError: a mistake in the config, the data, the experiment or the workdir; found before
        anything is compiled.
      ReplicasDiffer: an update gave different values on different devices.
      CheckpointDamaged: there are checkpoints, and not one is good.
      SavesFailed: the last save failed, or `config.max_failed_saves` in a row did.
      NonFinite: a loss or gradient was not finite; see `config.on_nonfinite`.
      Stopped: a signal that `haikutrain.main` catches; the last step's state is saved.
    """
    task = Task(experiment)
    folder = Workdir(workdir)
    if devices.is_main_process():
        folder.check_owner(task.name)
        folder.check_writable()
    task.check_update()
    with (
        contextlib.closing(folder),
        contextlib.closing(_checkpointer(task, folder)) as checkpointer,
        processes.committing(checkpointer.wait),
    ):
        if devices.is_main_process():
            folder.lock()
        start = restore_or_init(task, together(checkpointer))
        if start.ended is not None:
            logging.info("%s %s", folder.path, start.ended)
            return start.state
        if devices.is_main_process():
            folder.claim(task.name, task.config_json, overrides)
        logging.info(
            "%s: %s parameters on %s", task.name, f"{task.parameters:,}", devices.describe()
        )
        with contextlib.closing(_Run(task, folder, checkpointer, start)) as run:
            return run.loop(start)


def evaluate(
    experiment: Experiment,
    workdir: str | os.PathLike[str],
    checkpoint: str | int = "latest",
    *,
    predictions: str | os.PathLike[str] | None = None,
) -> Evaluations:
    """Evaluates a checkpoint on every split; appends the result to `metrics_eval.jsonl`.

    Args:
      experiment: the one that was trained.
      workdir: the folder of its run.
      checkpoint: "latest", "best" or a step.
      predictions: an npz file to write, of what `evaluate` keeps in `haikutrain.Rows`: an array
        `<split>/<name>` for each, every example once and in order.

    Returns:
      For each split its metrics: exact means over all its examples.
    """
    task = Task(experiment)
    if predictions is not None:
        task.check_rows()
    if devices.is_main_process():
        if predictions is not None:
            check_file(predictions)
        Workdir(workdir).check_writable()
    state = _restored(task, workdir, checkpoint)
    results = evaluation.evaluate_splits(task, state)
    if devices.is_main_process():
        folder, step = Workdir(workdir), int(state.step)
        files: list[writers.MetricWriter] = [
            writers.JsonLines(folder.metrics_eval, resume_step=sys.maxsize),
            writers.MediaFiles(folder.media),
        ]
        with folder.writing(), contextlib.closing(writers.Writers(files)) as writer:
            evaluation.write(writer, step, results)
        if predictions is not None:
            write_rows(predictions, {split: result.rows for split, result in results.items()})
    return evaluation.scalars(results)


def restore(
    experiment: Experiment, workdir: str | os.PathLike[str], checkpoint: str | int = "latest"
) -> TrainState:
    """The state of a checkpoint, on the devices. Arguments as for `evaluate`."""
    return _restored(Task(experiment), workdir, checkpoint)


def how_it_ended(workdir: str | os.PathLike[str]) -> str | None:
    """Why the run in `workdir` has ended, by its newest checkpoint; None if it can go on."""
    checkpointer = Checkpointer(Workdir(workdir).checkpoints, read_only=True)
    step = checkpointer.latest_step()
    return None if step is None else checkpointer.read_meta(step)["ended"]


def _restored(task: Task, workdir: str | os.PathLike[str], checkpoint: str | int) -> TrainState:
    folder = Workdir(workdir)
    if devices.is_main_process():
        folder.check_owner(task.name)
    with contextlib.closing(_checkpointer(task, folder, read_only=True)) as own:
        checkpointer = together(own)

        def read(step: int) -> TrainState:
            logging.info("reading checkpoint %d of %s", step, folder.path)
            return devices.place(checkpointer.restore(step, task.programs.state).state)

        return restore_chosen(checkpointer, checkpoint, read)


def _checkpointer(task: Task, folder: Workdir, *, read_only: bool = False) -> Checkpointer:
    return Checkpointer(
        folder.checkpoints,
        keep=task.config.keep_checkpoints,
        best_metric=task.best_metric,
        best_mode=task.config.best_mode,
        read_only=read_only,
    )


class _Run:
    """What one start of a run keeps beside the state."""

    def __init__(self, task: Task, folder: Workdir, checkpointer: Checkpointer, start: Start):
        self._task = task
        self._position = start.position
        self._evaluations: tuple[Evaluations, int | None] = {}, None
        self._window = Window(task.programs.metric_names, start.zeros, _judge(task, start))
        if start.window is not None:
            self._window.sums, self._window.count = start.window
        self._writer, self._progress = _open_writers(task, folder, start.step)
        config = task.config
        self._num_steps = config.num_steps  # A ConfigDict takes microseconds, at every step.
        self._log = Log(self._window, config.log_every, config.batch_size, self._write_train)
        self._saves = Saves(
            task, checkpointer, self._log, self._window, self._writer, self._evaluate
        )

    def close(self) -> None:
        self._saves.close()
        try:
            self._writer.close()
        except OSError as error:
            # A save would have failed for it: what there is to raise is under way, or said.
            logging.error("metrics could not be written: %s", error.strerror)

    def loop(self, start: Start) -> TrainState:
        """Runs updates until the end; the only place where a state changes."""
        state, step, window = start.state, start.step, self._window
        ahead = devices.RunAhead()
        hooks = self._hooks(start.stop)
        plan = _plan(step, start.stop, self._task.config.steps_per_call)
        info = stopped_by = None
        with self._task.feed.items(plan, start.position) as items:
            for item in items:
                stopped_by = processes.stop_requested()
                if stopped_by is not None:
                    break
                state, window.sums = self._task.programs.update(state, window.sums, item)
                window.count += item.steps
                step += item.steps
                self._position = item.position
                ahead.add(window.sums)
                info = self._info(step, item.steps, state)
                for hook in hooks:
                    hook(info)
                if info.stop_reason is not None:
                    break
        if info is not None:
            self._finish(info)
        if stopped_by is not None:
            done = "that is saved" if info is not None else "before its first step: nothing is new"
            raise Stopped(
                f"stopped by {stopped_by} at step {step} of {start.stop}, {done}; the same command "
                "goes on"
            )
        return state

    def _info(self, step: int, steps: int, state: TrainState) -> StepInfo:
        evaluations, evaluations_step = self._evaluations
        return StepInfo(
            step=step,
            steps=steps,
            num_steps=self._num_steps,
            state=state,
            evaluations=evaluations,
            evaluations_step=evaluations_step,
        )

    def _hooks(self, stop: int) -> list[Hook]:
        config = self._task.config

        def save(info: StepInfo) -> None:
            # The last save of a start says how it ended: `_finish` makes it.
            if info.step < stop and info.stop_reason is None:
                self._save(info, ended=None, judged=True)

        hooks: list[Hook] = [lambda info: self._saves.poll(), self._log]
        if config.eval_every is not None:
            hooks.append(every(config.eval_every, self._evaluate))
        hooks.extend(self._task.own_hooks())
        hooks.append(every(config.checkpoint_every, save))
        hooks.append(lambda info: self._progress(info.step))
        return hooks

    def _finish(self, info: StepInfo) -> None:
        ended = info.stop_reason
        if info.step >= info.num_steps:
            ended = ended or "reached num_steps"
        if ended is not None:
            self._log.close(info)
            try:
                self._evaluate(info)
            except BaseException:
                # What was trained is not lost with it.
                self._save(info, ended=None, judged=False)
                raise
        # A save out of turn is not judged: the log must be that of the uninterrupted run.
        in_turn = ended is not None or info.crossed(self._task.config.checkpoint_every)
        # Process 0 alone knows whether a save has failed.
        if processes.from_main("the last save", lambda: self._saves.last) != info.step:
            self._save(info, ended=ended, judged=in_turn)
        self._saves.finish()
        if ended is not None:
            logging.info("the run has ended at step %d: %s", info.step, ended)

    def _write_train(self, step: int, means: dict[str, float]) -> None:
        self._writer.write(step, "train", means)

    def _evaluate(self, info: StepInfo) -> None:
        if self._evaluations[1] != info.step:
            self._log.settle(info)
            with self._log.stopwatch.paused():
                results = evaluation.evaluate_splits(self._task, info.state)
                evaluation.write(self._writer, info.step, results)
                self._evaluations = evaluation.scalars(results), info.step
        info.evaluations, info.evaluations_step = self._evaluations

    def _save(self, info: StepInfo, *, ended: str | None, judged: bool) -> None:
        position = self._task.feed.gathered(self._position)
        self._saves.save(info, position, ended=ended, judged=judged)


def _judge(task: Task, start: Start) -> nonfinite.Judge:
    names = list(leaves.by_path(task.programs.state.params))
    config = task.config
    return nonfinite.Judge(config.on_nonfinite, config.max_skipped, names, start.skipped_before)


def _plan(step: int, stop: int, stride: int) -> Iterator[tuple[int, int]]:
    """(first step, steps) of each call: from multiples of `stride` as many steps, else single."""
    while step < stop:
        steps = stride if step % stride == 0 and step + stride <= stop else 1
        yield step, steps
        step += steps


def _open_writers(task: Task, folder: Workdir, step: int) -> tuple[writers.MetricWriter, Any]:
    if not devices.is_main_process():
        return writers.Writers([]), lambda step: None
    console = Console(task.config.num_steps)
    with folder.writing():
        files: list[writers.MetricWriter] = [
            writers.JsonLines(folder.metrics, resume_step=step),
            writers.TensorBoard(folder.tensorboard, resume_step=step),
            writers.MediaFiles(folder.media),
        ]
    return writers.Writers([*files, console]), console.progress
