"""Trains or evaluates the experiment of a config file.

    python -m haikutrain.main --config=FILE.py[:variant] [--config.FIELD=VALUE ...]

The same command again resumes. Exit codes: 0 finished; 2 a mistake in flags, config, data or
workdir, in one line; 130 interrupted; 1 anything else.
"""

import difflib
import logging as python_logging
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence

from absl import app, flags, logging
from ml_collections import ConfigDict

from haikutrain import config, config_file, devices, pipeline
from haikutrain.checkpoint_folder import CheckpointDamaged
from haikutrain.errors import UsageError
from haikutrain.train import evaluate, how_it_ended, train

# Their progress reports would bury ours; their warnings still show.
_CHATTY_PACKAGES = ("orbax", "jax", "grain")


def run(argv: Sequence[str]) -> int:
    """Runs the command line `python -m haikutrain.main *argv` and returns its exit code.

    A `UsageError` becomes one line on stderr and code 2, a damaged checkpoint one line and code 1;
    any other exception passes through.
    """
    try:
        app.run(_execute, argv=["haikutrain", *argv], flags_parser=_parse)
    except UsageError as error:
        print(f"haikutrain: error: {' '.join(str(error).split())}", file=sys.stderr)
        logging.debug("where it was raised", exc_info=True)  # Shown by --verbosity=1.
        return 2
    except CheckpointDamaged as error:
        print(
            f"haikutrain: {' '.join(str(error).split())}; move that folder away to go on from an "
            "earlier one",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("haikutrain: interrupted", file=sys.stderr)
        return 130
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
            return 1
        return stop.code or 0
    return 0


def _own_flags() -> flags.FlagValues:
    """A fresh set for each run, apart from absl's global one: `run` may be called repeatedly."""
    own = flags.FlagValues()
    own.set_gnu_getopt(True)  # absl's default depends on its version.
    flags.DEFINE_string(
        "config",
        None,
        "The config file, FILE.py or FILE.py:variant. --config.FIELD=VALUE overrides a field, "
        "--config.GROUP.FIELD=VALUE a nested one.",
        flag_values=own,
        allow_overwrite=False,
    )
    flags.DEFINE_string(
        "workdir",
        None,
        "Where the run lives; a run that is there already is resumed. By default "
        "runs/FILE[-variant].",
        flag_values=own,
    )
    flags.DEFINE_enum(
        "mode",
        "train",
        ["train", "eval"],
        "train: train, or go on training. eval: evaluate a checkpoint on every split.",
        flag_values=own,
    )
    flags.DEFINE_integer(
        "cpu_devices", None, "Simulate so many devices on the CPU.", flag_values=own
    )
    flags.DEFINE_string(
        "checkpoint",
        None,
        "With --mode=eval: latest (the default), best, or the step of a checkpoint.",
        flag_values=own,
    )
    flags.DEFINE_string(
        "predictions",
        None,
        "With --mode=eval: an npz file to write, of the values that evaluation keeps row by row.",
        flag_values=own,
    )
    for name in ("help", "helpshort", "helpfull"):
        text = "This help; --helpfull also shows the flags of the libraries."
        flags.DEFINE_boolean(name, False, text, flag_values=own)
    return own


class _Options:
    """What a command line asks for."""

    def __init__(self, argv: Sequence[str], own: flags.FlagValues, overrides: list[str]):
        self.config: str = own.config
        self.overrides = overrides
        self.workdir: str | None = own.workdir
        if own.workdir == "":
            raise UsageError("--workdir= is empty; name a folder, or leave the flag out")
        self.mode: str = own.mode
        self.cpu_devices: int | None = own.cpu_devices
        self.checkpoint = _checkpoint(own.checkpoint, own.mode)
        self.predictions: str | None = own.predictions
        if self.predictions is not None and self.mode != "eval":
            raise UsageError(
                f"--predictions={own.predictions} does nothing with --mode={own.mode}: add "
                "--mode=eval or leave it out"
            )
        self.command = ["python", "-m", "haikutrain.main", *argv]


def _parse(argv: Sequence[str]) -> _Options:
    """absl's `flags_parser`: turns each mistake on the command line into a `UsageError`."""
    own = _own_flags()
    try:
        expanded = flags.FLAGS.read_flags_from_files(list(argv))
        overrides, others = _split_overrides(expanded[1:])
        unknown = own([argv[0], *others], known_only=True)
        if own.help or own.helpshort or own.helpfull:
            libraries = f"\n{flags.FLAGS.get_help()}" if own.helpfull else ""
            print(f"{__doc__}\nFlags:\n{own.get_help()}{libraries}")
            raise SystemExit(0)
        flags.FLAGS.unparse_flags()
        left = flags.FLAGS(unknown)[1:]
        _set_verbosity()
    except flags.UnrecognizedFlagError as error:
        raise UsageError(_unknown_flag(error.flagname, own)) from error
    except flags.Error as error:
        raise UsageError(str(error)) from error
    if left:
        raise UsageError(
            f"unexpected argument {left[0]!r}: everything is given by flags, as --config=FILE.py; "
            "--help lists them"
        )
    if not own.config:
        raise UsageError("no config file: give one with --config=FILE.py")
    return _Options(argv[1:], own, overrides)


def _split_overrides(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates `--config.a.b=v` (also as two arguments, also `--noconfig.a`) from other flags."""
    overrides, others = [], []
    rest: Iterator[str] = iter(args)
    pending = next(rest, None)
    while pending is not None:
        arg, pending = pending, next(rest, None)
        if not re.match(r"--?(no)?config\.", arg):
            others.append(arg)
            continue
        # The value may be a negative number, but not the next flag.
        if "=" not in arg and pending is not None and not re.match(r"-+[^\d.]", pending):
            arg, pending = f"{arg}={pending}", next(rest, None)
        overrides.append(arg)
    return overrides, others


def _unknown_flag(name: str, own: flags.FlagValues) -> str:
    close = difflib.get_close_matches(name, [*own, *flags.FLAGS], n=1)
    hint = f"did you mean --{close[0]}?" if close else "--help lists the flags"
    if name in config.base_config():
        hint = f"a config field is set by --config.{name}=VALUE"
    return f"unknown flag --{name}; {hint}"


def _checkpoint(given: str | None, mode: str) -> str | int:
    if given is None:
        return "latest"
    if mode != "eval":
        raise UsageError(
            f"--checkpoint={given} does nothing with --mode={mode}: add --mode=eval or leave it out"
        )
    if given in ("latest", "best"):
        return given
    if given.isdecimal():
        return int(given)
    raise UsageError(f"--checkpoint={given}: it must be latest, best, or the number of a step")


def _execute(options: _Options) -> int:
    if options.cpu_devices is not None:
        devices.simulate(options.cpu_devices)  # Before the config file: it may start JAX.
    loaded = config_file.load(options.config, options.overrides)
    # First the rules that need no device: a mistake should not wait for a backend to start.
    config.validate(loaded.config)
    config.validate(loaded.config, device_count=devices.device_count())
    workdir = options.workdir or os.path.join("runs", loaded.name)
    experiment = loaded.experiment_class(loaded.config)
    if options.mode == "eval":
        results = evaluate(
            experiment, workdir, checkpoint=options.checkpoint, predictions=options.predictions
        )
        for split, values in results.items():
            for name, value in values.items():
                print(f"{split} {name} {value:.6g}")
        return 0
    state = train(experiment, workdir, overrides=options.overrides)
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


def _set_verbosity() -> None:
    """Shows INFO, but not the libraries' own, unless --verbosity says what to show."""
    handler = logging.get_absl_handler()
    handler.removeFilter(_is_worth_showing)
    if flags.FLAGS["verbosity"].using_default_value:
        logging.set_verbosity(logging.INFO)
        handler.addFilter(_is_worth_showing)
        handler.setFormatter(_Plain())


class _Plain(python_logging.Formatter):
    """INFO as it is; what is graver with absl's prefix of severity, time and place."""

    def format(self, record: python_logging.LogRecord) -> str:
        if record.levelno < python_logging.WARNING:
            return record.getMessage()
        return logging.PythonFormatter().format(record)


def _is_worth_showing(record: python_logging.LogRecord) -> bool:
    if record.levelno >= python_logging.WARNING:
        return True
    # As installed, in site-packages or dist-packages: the user's own folder may be called jax.
    installed = (f"-packages{os.sep}{name}{os.sep}" for name in _CHATTY_PACKAGES)
    return not any(folder in record.pathname for folder in installed)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
elif __name__ == "__mp_main__":  # In the worker processes of any pipeline.
    pipeline.end_with_parent()
