"""The command line: flags, overrides of config fields, every mistake in them a UsageError."""

import difflib
import json
import logging as python_logging
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import flags, logging

from haikutrain import config
from haikutrain.errors import UsageError
from haikutrain.wire import Address

# Their progress reports would bury ours; their warnings still show.
_CHATTY_PACKAGES = ("orbax", "jax", "grain")


COMMAND = "HAIKUTRAIN_COMMAND"
"""The environment variable with the command that has started all processes, a JSON list."""

_USAGE = """Trains or evaluates the experiment of a config file.

    python -m haikutrain.main --config=FILE.py[:variant] [--config.FIELD=VALUE ...]

The same command again resumes. Exit codes: 0 finished; 2 a mistake in flags, config, data or
workdir, in one line, or a promise that --mode=check found broken; 3 a loss or gradient was not
finite; 42 stopped by a signal, start again to go on; 75 another process of the job died, start
again to go on; 130 ended by a second Ctrl-C; 1 anything else.
"""


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
        ["train", "eval", "check"],
        "train: train, or go on training. eval: evaluate a checkpoint on every split. check: try "
        "in a few steps, in a temporary folder, that this experiment resumes, averages and trains "
        "as it should.",
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
    flags.DEFINE_boolean(
        "follow",
        False,
        "With --mode=eval: evaluate each checkpoint as it appears, until the run has ended.",
        flag_values=own,
    )
    flags.DEFINE_string(
        "predictions",
        None,
        "With --mode=eval: an npz file to write, of the values that evaluation keeps row by row.",
        flag_values=own,
    )
    _define_processes(own)
    for name in ("help", "helpshort", "helpfull"):
        text = "This help; --helpfull also shows the flags of the libraries."
        flags.DEFINE_boolean(name, False, text, flag_values=own)
    return own


def _define_processes(own: flags.FlagValues) -> None:
    flags.DEFINE_enum(
        "jax_distributed",
        "auto",
        ["auto", "on", "off"],
        "Train together with other processes. auto: where the next three flags are given, and "
        "under Open MPI, SLURM, Kubernetes and on TPU pods, which say what is left out of them.",
        flag_values=own,
    )
    text = "HOST:PORT where process 0 listens; the same in all processes."
    flags.DEFINE_string("coordinator_address", None, text, flag_values=own)
    text = "How many processes there are."
    flags.DEFINE_integer("num_processes", None, text, flag_values=own)
    text = "Which of them this is, from 0."
    flags.DEFINE_integer("process_id", None, text, flag_values=own)
    text = "Seconds to wait for the other processes."
    flags.DEFINE_float("init_timeout", 60, text, flag_values=own)


class Options:
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
        self.processes = _processes(own)
        self.follow: bool = own.follow
        if own.follow:
            _check_follow(own)
        self.command = ["python", "-m", "haikutrain.main", *argv]
        if COMMAND in os.environ:
            self.command = json.loads(os.environ[COMMAND])


def parse(argv: Sequence[str], *, libraries: Callable[[], None] = lambda: None) -> Options:
    """absl's `flags_parser`: turns each mistake on the command line into a `UsageError`.

    Args:
      argv: the program's name and its arguments.
      libraries: imports what defines flags of its own; called only if such a flag is wanted.
    """
    own = _own_flags()
    try:
        expanded = flags.FLAGS.read_flags_from_files(list(argv))
        overrides, others = _split_overrides(expanded[1:])
        unknown = own([argv[0], *others], known_only=True)
        if own.help or own.helpshort or own.helpfull:
            if own.helpfull:
                libraries()
            more = f"\n{flags.FLAGS.get_help()}" if own.helpfull else ""
            print(f"{_USAGE}\nFlags:\n{own.get_help()}{more}")
            raise SystemExit(0)
        left = _parse_global(unknown, libraries)
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
    return Options(argv[1:], own, overrides)


def _parse_global(argv: Sequence[str], libraries: Callable[[], None]) -> list[str]:
    """Parses what is left into absl's global flags; returns what is no flag."""
    flags.FLAGS.unparse_flags()
    try:
        return flags.FLAGS(argv)[1:]
    except flags.UnrecognizedFlagError:
        libraries()
        flags.FLAGS.unparse_flags()
        return flags.FLAGS(argv)[1:]


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


def _processes(own: flags.FlagValues) -> dict[str, Any]:
    """The arguments of `processes.start`."""
    names = ("coordinator_address", "num_processes", "process_id")
    given = {name: own[name].value for name in names if own[name].value is not None}
    shown = " ".join(f"--{name}={value}" for name, value in given.items())
    if own.jax_distributed == "off" and given:
        raise UsageError(f"--jax_distributed=off contradicts {shown}; leave out one or the other")
    if given and (own.mode == "check" or own.follow):
        what = "--follow" if own.follow else "--mode=check"
        raise UsageError(f"{what} runs in one process: leave out {shown}")
    count, own_id = given.get("num_processes"), given.get("process_id")
    if count is not None and count < 1:
        raise UsageError(f"--num_processes={count}: it must be 1 or more")
    if own_id is not None and not 0 <= own_id < (count or own_id + 1):
        raise UsageError(
            f"--process_id={own_id}: it must be from 0 to {count - 1 if count else 'num_processes'}"
        )
    if not 0 < own.init_timeout < math.inf:
        raise UsageError(
            f"--init_timeout={own.init_timeout}: it must be a number of seconds above 0"
        )
    address = given.pop("coordinator_address", None)
    return {
        "mode": own.jax_distributed,
        "address": None if address is None else Address.parse(address),
        **given,
        "init_timeout": own.init_timeout,
    }


def _check_follow(own: flags.FlagValues) -> None:
    if own.mode != "eval":
        raise UsageError(
            f"--follow does nothing with --mode={own.mode}: add --mode=eval or leave it out"
        )
    for name in ("checkpoint", "predictions"):
        if own[name].value is not None:
            raise UsageError(
                f"--{name}={own[name].value} is of one checkpoint, and --follow evaluates every "
                "one: leave one of the two out"
            )


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
