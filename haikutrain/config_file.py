"""Reading a config file: executing it once, overriding its fields, finding its Experiment."""

import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import operator
import os
import shlex
import sys
import traceback
import types
from collections.abc import Sequence
from typing import Any, NoReturn

import cloudpickle
from absl import flags
from ml_collections import ConfigDict, config_dict, config_flags

from haikutrain.errors import UsageError

_EXPERIMENT_METHODS = ("init", "update", "evaluate", "train_data")

# The types that a flag can set, as an error calls them, and what to do about the others.
_NAMES: dict[type, str] = {
    int: "an int",
    float: "a float",
    bool: "true or false",
    str: "a string",
    tuple: "a tuple",
    object: "any literal",
}
_REFUSED: dict[type, str] = {
    list: "a list, which no flag can set; make it a tuple in the config file",
    ConfigDict: "a group of fields; override them one by one",
    type(None): "None and has no type; make it ml_collections.config_dict.placeholder(float), "
    "or of another type, in the config file",
}


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What a config file gave."""

    config: ConfigDict
    """The config with the overrides in it, locked."""
    experiment_class: type
    """The class that `config.experiment` names."""
    name: str
    """The file's stem, and `-<variant>` if one was asked for: the default name of the run."""


def load(path: str, overrides: Sequence[str] = ()) -> Loaded:
    """Executes a config file once and applies overrides from the command line.

    Args:
      path: `FILE.py`, or `FILE.py:variant` to call `get_config(variant)`.
      overrides: `--config.a.b=value` each; checked against the fields and their types.

    Raises:
      UsageError: the file cannot be read, fails, or does not give a config; an override names no
        field or does not fit its type; `config.experiment` names no Experiment.
    """
    path, _, variant = path.partition(":")
    stem = os.path.splitext(os.path.basename(path))[0]
    module = _execute(path, stem)
    config = _call_get_config(module, path, variant)
    if isinstance(config, config_dict.FrozenConfigDict):
        config = ConfigDict(config)
    if not isinstance(config, ConfigDict):
        raise UsageError(
            f"get_config() in {path} returned {type(config).__name__}: it must return the config "
            "that it got from haikutrain.base_config()"
        )
    _apply_overrides(config, overrides)
    name = f"{stem}-{variant}" if variant else stem
    return Loaded(config, resolve_experiment(config, module), name)


def _execute(path: str, stem: str) -> types.ModuleType:
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        raise UsageError(f"cannot read the config file {path}: {error.strerror}") from error
    # No import statement can spell this name, so the file shadows no installed module; pickling
    # by value lets the worker processes of a data pipeline have the classes defined in it.
    module = types.ModuleType(f"config:{stem}")
    module.__file__ = os.path.abspath(path)
    sys.modules[module.__name__] = module
    folder = os.path.dirname(module.__file__)
    if folder not in sys.path:
        sys.path.append(folder)  # Last, so that what lies beside the file shadows nothing.
    cloudpickle.register_pickle_by_value(module)
    try:
        exec(compile(source, module.__file__, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        _refuse_file(path, module, error)
    return module


def _call_get_config(module: types.ModuleType, path: str, variant: str) -> Any:
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        raise UsageError(
            f"{path} has no function get_config(): a config file defines one, which returns a "
            "config made by haikutrain.base_config()"
        )
    arguments = [variant] if variant else []
    signature = inspect.signature(get_config)
    try:
        signature.bind(*arguments)
    except TypeError as error:
        if variant:
            raise UsageError(
                f"--config={path}:{variant} asks for a variant, but get_config{signature} does "
                f"not take one: leave ':{variant}' out, or define get_config(variant)"
            ) from error
        raise UsageError(
            f"get_config{signature} needs a variant: give one as --config={path}:VARIANT"
        ) from error
    try:
        return get_config(*arguments)
    except (Exception, SystemExit) as error:
        _refuse_file(path, module, error)


def _refuse_file(path: str, module: types.ModuleType, error: BaseException) -> NoReturn:
    """Names the file's own line that failed, however deep below it the error was raised."""
    if isinstance(error, SyntaxError) and error.filename == module.__file__:
        line, what = error.lineno, f"SyntaxError: {error.msg}"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((f.lineno for f in reversed(frames) if f.filename == module.__file__), None)
        what = " ".join("".join(traceback.format_exception_only(error)).split())
    where = f"{path}, line {line}" if line else path
    raise UsageError(f"error in the config file {where}: {what}") from error


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(known))}"


def _apply_overrides(config: ConfigDict, overrides: Sequence[str]) -> None:
    for override in overrides:
        _check_override(config, override)
    try:
        before = config.copy_and_resolve_references()
    except config_dict.RequiredValueError as error:
        raise UsageError(
            "the config has a required_placeholder, which no flag can fill: use "
            "config_dict.placeholder(TYPE) instead"
        ) from error
    values = flags.FlagValues()
    argv = ["config", *overrides]
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)
        values(argv)
    except (flags.Error, ValueError, TypeError, KeyError) as error:
        raise UsageError(" ".join(str(error).split())) from error
    for path, value in config_flags.get_override_values(values["config"]).items():
        if isinstance(value, tuple):
            _check_elements(path, operator.attrgetter(path)(before), value)


def _check_elements(path: str, before: tuple[Any, ...] | None, after: tuple[Any, ...]) -> None:
    """Refuses a tuple of other things than it held, and `(a,b)`, which is read as one string."""
    kinds = {type(element) for element in before or ()}
    allowed = kinds | ({int} if float in kinds else set())
    for element in after:
        unquoted = isinstance(element, str) and element[:1] in ("(", "[")
        if unquoted or (kinds and type(element) not in allowed):
            raise UsageError(
                f"--config.{path}: {element!r} is not an element for a field like {before!r}; "
                f"write --config.{path}={shlex.quote(repr(before))} for example"
            )


def _check_override(config: ConfigDict, override: str) -> None:
    """Refuses, with the field's name, what the library would refuse without it or let pass."""
    flag, equals, value = override.partition("=")
    flag_name, _, path = flag.lstrip("-").partition(".")
    *parents, leaf = path.split(".")
    group: Any = config
    for depth, part in enumerate([*parents, leaf]):
        above = ".".join(parents[:depth])
        if not isinstance(group, ConfigDict):
            raise UsageError(f"{override}: {above!r} is a value and has no fields")
        if part not in group:
            within = f" in {above!r}" if above else ""
            hint = _nearest(part, list(group.keys()))
            raise UsageError(f"{override}: the config has no field {part!r}{within}; {hint}")
        kind = group.get_type(part)
        group = group[part] if depth < len(parents) else None
    if kind in (int, float) and equals:
        try:
            kind(value)
        except ValueError as error:
            raise UsageError(f"{override}: {path!r} is {_NAMES[kind]}, not {value!r}") from error
    elif not equals and kind is not bool:
        raise UsageError(f"{override}: give {path!r} a value, as --config.{path}=VALUE")
    elif kind not in _NAMES and flag_name == "config":
        raise UsageError(
            f"{override}: {path!r} is {_REFUSED.get(kind, f'of type {kind.__name__}')}"
        )


def resolve_experiment(config: ConfigDict, module: types.ModuleType | None = None) -> type:
    """The class that `config.experiment` names: `"package.module:Class"`, or one of `module`.

    Raises:
      UsageError: it is unset or names no module, no class, or a class that is no Experiment.
    """
    given = config.get("experiment")
    if not isinstance(given, str) or ":" not in given:
        raise UsageError(
            f"config.experiment is {given!r}: it is required and names the class to train, as "
            "'package.module:Class', or ':Class' for a class in the config file"
        )
    module_name, _, class_name = given.partition(":")
    home = _import(module_name, given, module) if module_name else module
    if home is None:
        raise UsageError(f"config.experiment={given!r} needs a config file: there is none")
    found = getattr(home, class_name, None)
    if not isinstance(found, type):
        classes = [name for name, value in vars(home).items() if isinstance(value, type)]
        where = module_name or "the config file"
        raise UsageError(
            f"config.experiment={given!r}: {where} has no class {class_name!r}; "
            + _nearest(class_name, classes)
        )
    if not all(callable(getattr(found, method, None)) for method in _EXPERIMENT_METHODS):
        raise UsageError(
            f"config.experiment={given!r}: {class_name} is not an Experiment; write "
            f"class {class_name}(haikutrain.Experiment)"
        )
    return found


def _import(name: str, given: str, module: types.ModuleType | None) -> types.ModuleType:
    try:
        spec = importlib.util.find_spec(name)
        # A config file that names itself by its import path is not executed a second time.
        if (
            module
            and spec
            and spec.origin
            and os.path.realpath(spec.origin) == os.path.realpath(str(module.__file__))
        ):
            return module
        return importlib.import_module(name)
    except Exception as error:
        what = " ".join("".join(traceback.format_exception_only(error)).split())
        raise UsageError(f"config.experiment={given!r}: cannot import {name}: {what}") from error
