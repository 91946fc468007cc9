"""Trains, evaluates or checks: `python -m haikutrain.main --config=FILE.py`.

JAX and all that needs it is imported by what runs, not here: help and mistakes in flags are
answered at once, and signals are caught before anything is touched.
"""

import functools
import importlib
import os
import shlex
import sys
from collections.abc import Sequence

from absl import app, logging
from ml_collections import ConfigDict

from haikutrain import command_line, config, processes, signals
from haikutrain.errors import (
    CheckpointDamaged,
    CheckpointUnreadable,
    NonFinite,
    PeerLost,
    SavesFailed,
    Stopped,
    UsageError,
)

_EXIT_CODES: dict[type[Exception], int] = {
    CheckpointDamaged: 1,
    CheckpointUnreadable: 1,
    SavesFailed: 1,
    NonFinite: 3,
    Stopped: 42,
    PeerLost: 75,
}


def run(argv: Sequence[str]) -> int:
    """Runs the command line `python -m haikutrain.main *argv` and returns its exit code.

    The errors of `haikutrain.errors` become one line on stderr and their code; any other exception
    passes through.
    """
    with signals.caught():
        return _run(argv)


def _run(argv: Sequence[str]) -> int:
    try:
        parse = functools.partial(command_line.parse, libraries=_import_libraries)
        app.run(_execute, argv=["haikutrain", *argv], flags_parser=parse)
    except UsageError as error:
        logging.debug("where it was raised", exc_info=True)  # Shown by --verbosity=1.
        return processes.leave(2, f"error: {error}", error)
    except tuple(_EXIT_CODES) as error:
        return processes.leave(_EXIT_CODES[type(error)], str(error), error)
    except KeyboardInterrupt as error:
        return processes.leave(130, "interrupted", error)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return processes.leave(1 if isinstance(stop.code, str) else stop.code or 0, None, stop)
    except Exception as error:
        if processes.count() == 1:
            raise
        return processes.leave(1, None, error)
    return processes.leave(0)


def _import_libraries() -> None:
    importlib.import_module("haikutrain.loop")


def _execute(options: command_line.Options) -> int:
    from haikutrain import config_file, devices
    from haikutrain.follow import follow
    from haikutrain.loop import evaluate, how_it_ended, train

    if options.mode != "train":
        signals.end_at_once()
    if options.mode == "check":
        from haikutrain.check import Request, check

        return check(Request(options.config, options.overrides, options.cpu_devices))
    if options.cpu_devices is not None:
        devices.simulate(options.cpu_devices)  # Before the config file: it may start JAX.
    processes.start(**options.processes)
    loaded = config_file.load(options.config, options.overrides)
    # First the rules that need no device: a mistake should not wait for a backend to start.
    config.validate(loaded.config)
    config.validate(loaded.config, device_count=devices.device_count())
    workdir = options.workdir or os.path.join("runs", loaded.name)
    experiment = loaded.experiment_class(loaded.config)
    if options.follow:
        follow(experiment, workdir)
        return 0
    if options.mode == "eval":
        results = evaluate(
            experiment, workdir, checkpoint=options.checkpoint, predictions=options.predictions
        )
        for split, values in results.items() if processes.index() == 0 else ():
            for name, value in values.items():
                print(f"{split} {name} {value:.6g}")
        return 0
    state = train(experiment, workdir, overrides=options.overrides)
    if processes.index() != 0:
        return 0
    print(_where_things_are(workdir))
    print(_how_to_go_on(int(state.step), how_it_ended(workdir), loaded.config, options.command))
    return 0


def _where_things_are(workdir: str) -> str:
    checkpoints, log, curves = (
        os.path.join(workdir, name) for name in ("checkpoints", "metrics.jsonl", "tensorboard")
    )
    return (
        f"checkpoints: {checkpoints}\n"
        f"metrics:     {log}\n"
        f"curves:      tensorboard --logdir {shlex.quote(curves)}"
    )


def _how_to_go_on(
    step: int, ended: str | None, run_config: ConfigDict, command: Sequence[str]
) -> str:
    end = run_config.num_steps
    if ended is None and step < end:
        text = f"stopped at step {step} of {end}; to resume:"
    else:
        end = 2 * max(step, end)
        ended = ended or "reached num_steps"
        text = f"finished at step {step} ({ended}); to train on, raise num_steps:"
        command = [*command, f"--config.num_steps={end}"]
    if run_config.stop_after is not None and run_config.stop_after <= step:
        # The very same command would stop where this one did.
        command = [*command, f"--config.stop_after={end}"]
    return f"{text}\n    {shlex.join(command)}"


if __name__ == "__main__":
    signals.catch()
    code = run(sys.argv[1:])
    signals.ignore()
    sys.exit(code)
elif __name__ == "__mp_main__":  # In the worker processes of any pipeline.
    from haikutrain import pipeline

    pipeline.end_with_parent()
