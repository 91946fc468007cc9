"""The base config: its fields, their rules, and what a run may change when it resumes."""

import difflib
import json
import math
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict, config_dict

from haikutrain.errors import UsageError

_PERIODS = ("log_every", "eval_every", "checkpoint_every")
_POSITIVE = (
    "num_steps",
    "batch_size",
    "steps_per_call",
    "accumulate_steps",
    *_PERIODS,
    "keep_checkpoints",
    "stop_after",
    "max_skipped",
    "max_failed_saves",
)
_CHOICES = {
    "best_mode": ("max", "min"),
    "restore_only": ("all", "weights"),
    "on_nonfinite": ("stop", "skip"),
}
# The class itself is compared, not how it was named; a notebook does not name it at all.
# A restored run starts elsewhere only while its workdir has no checkpoint of its own, so what
# it started from may change afterwards.
_MAY_CHANGE = {
    *_PERIODS,
    "num_steps",
    "stop_after",
    "keep_checkpoints",
    "eval_raw",
    "steps_per_call",
    "compilation_cache",
    "experiment",
    "restore_from",
    "restore_only",
    "on_nonfinite",
    "max_skipped",
    "max_failed_saves",
}


def base_config() -> ConfigDict:
    """The fields that the framework reads. All periods are in steps (global batches consumed).

    An experiment's `get_config()` starts from it, sets what it wants and adds fields of its own.
    A field that is None here has a type all the same: it is off until it is set, in the file or
    by `--config.<field>=<value>`.
    """
    config = ConfigDict()
    # What to train: "package.module:Class", or ":Class" for a class in the config file itself.
    config.experiment = config_dict.placeholder(str)
    # Where the initial params, the training keys and the order of the data come from.
    config.seed = 0
    # The run ends after this many global batches.
    config.num_steps = config_dict.placeholder(int)
    # Examples in a global batch: over all devices of all processes.
    config.batch_size = config_dict.placeholder(int)
    # Updates run by one call of the compiled function: more is faster for tiny networks.
    config.steps_per_call = 1
    # Parts in which one global batch passes through the network, to save memory.
    config.accumulate_steps = 1
    # A line of metrics (means since the last one) every so many steps.
    config.log_every = 50
    # An evaluation of every split every so many steps; None: at the end of the run only.
    config.eval_every = config_dict.placeholder(int)
    # A checkpoint every so many steps, and one at the end.
    config.checkpoint_every = 500
    # The newest so many checkpoints stay on disk.
    config.keep_checkpoints = 3
    # The checkpoint with the best of this stays too: "split/name", or a name if there is one split.
    config.best_metric = config_dict.placeholder(str)
    # Whether the best is the highest ("max") or the lowest ("min").
    config.best_mode = "max"
    # Stop after so many saves in a row that failed, on a full disk say; each period tries again.
    config.max_failed_saves = 3
    # A loss or gradient that is NaN or infinite: "stop" ends the run, "skip" leaves the step out.
    config.on_nonfinite = "stop"
    # Stop after so many steps in a row that were skipped.
    config.max_skipped = 10
    # Start from this checkpoint or workdir, as long as the workdir has no checkpoint of its own.
    config.restore_from = config_dict.placeholder(str)
    # "all", or "weights": params and network state, with a fresh optimizer at step 0.
    config.restore_only = "all"
    # End this start at that step; schedules do not move, a later start goes on.
    config.stop_after = config_dict.placeholder(int)
    # A jmp policy such as "params=float32,compute=bfloat16,output=float32".
    config.precision = config_dict.placeholder(str)
    # Evaluate with averaged weights: average = decay * average + (1 - decay) * weights.
    config.ema_decay = config_dict.placeholder(float)
    # Evaluate the weights that are not averaged as well: their metrics are called raw_<name>.
    config.eval_raw = False
    # Scale the gradients down to this global norm when theirs is larger.
    config.grad_clip_norm = config_dict.placeholder(float)
    # A folder in which compiled programs are kept for the next start, or "off". None: the one that
    # JAX_COMPILATION_CACHE_DIR names, else haikutrain/compiled in $XDG_CACHE_HOME or ~/.cache.
    config.compilation_cache = config_dict.placeholder(str)
    return config


def validate(config: ConfigDict, *, device_count: int | None = None) -> None:
    """Checks the base config's fields, without starting anything.

    Args:
      config: a config that began as `base_config()`.
      device_count: devices of all processes; None leaves out the rules that need it.

    Raises:
      UsageError: naming the first field that breaks a rule, its value, the rule and the fix.
    """
    base = base_config()
    _check_types(config, base)
    _check_slips(config, base)
    for name in _POSITIVE:
        if config[name] is not None and config[name] < 1:
            _refuse(name, config[name], "it must be 1 or more")
    if config.num_steps >= 2**31:
        _refuse("num_steps", config.num_steps, "steps are int32, so it must be below 2**31")
    if not 0 <= config.seed < 2**32:
        # JAX cuts a larger seed to 32 bits, and two different seeds would be the same.
        _refuse("seed", config.seed, "it must be from 0 to 2**32 - 1")
    _check_batch(config, device_count)
    _check_steps_per_call(config)
    _check_choices(config)


def _refuse(name: str, value: Any, rule: str) -> None:
    raise UsageError(f"config.{name}={value!r}: {rule}")


def _check_types(config: ConfigDict, base: ConfigDict) -> None:
    for name in base:
        if name not in config:
            raise UsageError(
                f"config.{name} is missing: get_config() must begin with haikutrain.base_config()"
            )
        kind, value = base.get_type(name), config[name]
        if value is None and base[name] is None and name not in ("num_steps", "batch_size"):
            continue
        if value is None:
            slip = difflib.get_close_matches(name, [own for own in config if own not in base], n=1)
            hint = f" (is {slip[0]!r} a misspelling of it?)" if slip else ""
            raise UsageError(
                f"config.{name} is required{hint}: set it in get_config(), or by "
                f"--config.{name}=VALUE"
            )
        # bool is an int to Python, and ConfigDict lets one into a field of ints.
        if type(value) is not kind and not (kind is float and type(value) is int):
            _refuse(name, value, f"it must be of type {kind.__name__}, not {type(value).__name__}")
        if value == "":
            _refuse(name, value, "it must not be empty; leave it out to do without")


def _check_slips(config: ConfigDict, base: ConfigDict) -> None:
    """Refuses a new field that is one slip away from a base field left at its default."""
    for own in (name for name in config if name not in base):
        for name in base:
            if config[name] == base[name] and _one_slip(own, name):
                raise UsageError(
                    f"config.{own} is a new field, but differs from the base config's {name!r} by "
                    f"one letter: write {name!r}, or give your own field another name"
                )


def _one_slip(typed: str, meant: str) -> bool:
    """Whether one letter was left out, added, changed, or swapped with the next one.

    A plural is no slip (`batch_sizes` may well be meant), nor is anything near a short name.
    """
    if len(meant) < 8 or typed == meant + "s":
        return False
    start = 0
    while start < min(len(typed), len(meant)) and typed[start] == meant[start]:
        start += 1
    end_typed, end_meant = typed[start:], meant[start:]
    return (
        end_typed == end_meant[1:]
        or end_typed[1:] == end_meant
        or end_typed[1:] == end_meant[1:]
        or (end_typed[1::-1] == end_meant[:2] and end_typed[2:] == end_meant[2:])
    )


def _check_batch(config: ConfigDict, device_count: int | None) -> None:
    size, parts = config.batch_size, config.accumulate_steps
    if size % parts:
        _refuse("batch_size", size, f"accumulate_steps={parts} must divide it")
    if device_count is None:
        return
    if size % device_count:
        nearest = max(1, round(size / device_count)) * device_count
        _refuse(
            "batch_size",
            size,
            f"the {device_count} devices share a batch equally, so {device_count} must divide it; "
            f"{nearest} would do",
        )
    if size % (device_count * parts):
        _refuse(
            "batch_size",
            size,
            f"{device_count} devices with accumulate_steps={parts} need a multiple of "
            f"{device_count * parts}",
        )


def _check_steps_per_call(config: ConfigDict) -> None:
    for name in ("num_steps", "stop_after", *_PERIODS):
        if config[name] is not None and config[name] % config.steps_per_call:
            _refuse(
                "steps_per_call",
                config.steps_per_call,
                f"it must divide {name}={config[name]}; change one of the two",
            )


def _check_choices(config: ConfigDict) -> None:
    for name, choices in _CHOICES.items():
        if config[name] not in choices:
            _refuse(name, config[name], f"it must be {choices[0]!r} or {choices[1]!r}")
    if config.restore_only == "weights" and config.restore_from is None:
        _refuse("restore_only", "weights", "it does nothing without restore_from; set both")
    if config.eval_raw and config.ema_decay is None:
        _refuse("eval_raw", True, "it does nothing without ema_decay; set both")
    if config.ema_decay is not None and not 0 < config.ema_decay < 1:
        _refuse("ema_decay", config.ema_decay, "it must lie between 0 and 1, such as 0.999")
    if config.grad_clip_norm is not None and not 0 < config.grad_clip_norm < math.inf:
        _refuse("grad_clip_norm", config.grad_clip_norm, "it must be a positive number")


def check_same_run(saved: Mapping[str, Any], config: ConfigDict) -> list[str]:
    """Compares the config that a run was saved with and the one it is to go on with.

    Args:
      saved: `to_json` of the config that the checkpoint was trained with.
      config: the config of this start.

    Returns:
      A line for each changed field of the experiment's own, `name: old -> new`, to warn with.

    Raises:
      UsageError: a base field that makes the run what it is has changed; names all of these.
    """
    base = to_json(base_config())
    before, now = dict(base, **saved), to_json(config)
    refused = [
        f"{name} ({_show(before[name])} -> {_show(now[name])})"
        for name in base
        if name not in _MAY_CHANGE and _show(before[name]) != _show(now[name])
    ]
    if refused:
        raise UsageError(
            f"this run cannot go on with another {', '.join(refused)}: put back the old value, "
            "or start a new run in another workdir"
        )
    shown_before, shown_now = (
        {
            path: _show(leaf)
            for name in tree
            if name not in base
            for path, leaf in _leaves(tree, name)
        }
        for tree in (before, now)
    )
    changes = {
        path: (shown_before.get(path, "absent"), shown_now.get(path, "absent"))
        for path in sorted({*shown_before, *shown_now})
    }
    return [f"{path}: {old} -> {new}" for path, (old, new) in changes.items() if old != new]


def _show(value: Any) -> str:
    # Compared as text, too: there NaN equals itself, and 1 is not True.
    return json.dumps(value)


def _leaves(tree: Mapping[str, Any], name: str, path: str = "") -> list[tuple[str, Any]]:
    value, path = tree[name], path + name
    if isinstance(value, Mapping) and value:
        return [leaf for below in value for leaf in _leaves(value, below, f"{path}.")]
    return [(path, value)]


def to_json(config: ConfigDict) -> dict[str, Any]:
    """The config as plain data for a JSON file: dicts, lists, strings, numbers, bools and None.

    Raises:
      UsageError: a field holds anything else; names it.
    """
    return {name: _plain(config, name, f"config.{name}") for name in sorted(config.keys())}


def _plain(holder: Any, key: Any, path: str) -> Any:
    try:
        value = holder[key]
    except config_dict.RequiredValueError as error:
        raise UsageError(f"{path} is required: set it in get_config()") from error
    if isinstance(value, ConfigDict | Mapping):
        for name in value:
            if not isinstance(name, str):
                raise UsageError(f"{path} has the key {name!r}: only strings can be keys")
        return {name: _plain(value, name, f"{path}.{name}") for name in sorted(value.keys())}
    if isinstance(value, list | tuple):
        return [_plain(value, index, f"{path}[{index}]") for index in range(len(value))]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise UsageError(
        f"{path} is {value!r}, of type {type(value).__name__}: a config holds plain data only "
        "(numbers, strings, bools, tuples, nested configs); build anything else in the Experiment"
    )
