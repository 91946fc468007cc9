"""Config files: read once, overridden with types, refused with the field's name."""

import importlib
import json
import sys

import cloudpickle
import ml_collections
import pytest

from haikutrain import config as config_lib
from haikutrain import config_file
from haikutrain.errors import UsageError

EXPERIMENT = """
from haikutrain.config import base_config

class Toy:
    def __init__(self, config):
        self.config = config
    def init(self, rngs, batch): ...
    def update(self, state, batch, rngs): ...
    def evaluate(self, state, batch, rngs): ...
    def train_data(self): ...

NotAnExperiment = int

"""

GET_CONFIG = """
def get_config():
    config = base_config()
    config.experiment = ":Toy"
    config.num_steps = 1000
    config.batch_size = 8
    config.learning_rate = 0.5
    config.augment = False
    config.layers = (8, 16)
    config.words = ("x", "y")
    config.names = ["a"]
    config.untyped = None
    config.model = {"width": 32, "head": {"bias": True}}
    return config
"""


@pytest.fixture
def write(tmp_path):
    """Writes a config file and returns its path."""

    def write(source: str = EXPERIMENT + GET_CONFIG, name: str = "toy.py") -> str:
        (tmp_path / name).write_text(source)
        return str(tmp_path / name)

    return write


def _config(**changes):
    config = config_lib.base_config()
    config.update({"experiment": ":Toy", "num_steps": 1000, "batch_size": 8})
    # Not through ConfigDict's own checks: a notebook may have built the config in any way.
    return ml_collections.ConfigDict({**config.to_dict(), **changes})


def _message(function, *args, **kwargs) -> str:
    with pytest.raises(UsageError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_base_config_has_these_fields_and_defaults():
    assert config_lib.base_config().to_dict() == {
        "experiment": None,
        "seed": 0,
        "num_steps": None,
        "batch_size": None,
        "steps_per_call": 1,
        "accumulate_steps": 1,
        "log_every": 50,
        "eval_every": None,
        "checkpoint_every": 500,
        "keep_checkpoints": 3,
        "best_metric": None,
        "best_mode": "max",
        "max_failed_saves": 3,
        "on_nonfinite": "stop",
        "max_skipped": 10,
        "restore_from": None,
        "restore_only": "all",
        "stop_after": None,
        "precision": None,
        "ema_decay": None,
        "eval_raw": False,
        "grad_clip_norm": None,
        "compilation_cache": None,
    }


# --- loading a file --------------------------------------------------------------------------


def test_load_gives_config_class_and_name(write):
    loaded = config_file.load(write())
    assert (loaded.config.num_steps, loaded.config.learning_rate) == (1000, 0.5)
    assert loaded.experiment_class.__name__ == "Toy"
    assert loaded.name == "toy"
    config_lib.validate(loaded.config, device_count=8)
    with pytest.raises(AttributeError):
        loaded.config.mistyped = 1


def test_variant_reaches_get_config_and_the_name(write):
    source = EXPERIMENT + GET_CONFIG.replace("get_config()", "get_config(size)").replace(
        "0.5", "float(size)"
    )
    loaded = config_file.load(write(source) + ":2")
    assert (loaded.config.learning_rate, loaded.name) == (2.0, "toy-2")


def test_file_is_executed_once_even_if_it_names_itself_by_its_import_path(
    write, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    count = "with open(__file__ + '.count', 'a') as file:\n    file.write('x')\n"
    for name, experiment in [("once_a", ":Toy"), ("once_b", "once_b:Toy")]:
        source = (EXPERIMENT + count + GET_CONFIG).replace('":Toy"', repr(experiment))
        loaded = config_file.load(write(source, f"{name}.py"))
        assert isinstance(loaded.experiment_class, type)
        assert (tmp_path / f"{name}.py.count").read_text() == "x"
        assert name not in sys.modules


def test_classes_of_the_file_are_pickled_by_value_and_shadow_no_module(write, monkeypatch):
    loaded = config_file.load(write(name="json.py"))
    assert sys.modules["json"] is json
    blob = cloudpickle.dumps(loaded.experiment_class)
    # A worker process has not executed the config file.
    monkeypatch.delitem(sys.modules, loaded.experiment_class.__module__)
    again = cloudpickle.loads(blob)
    assert again(3).config == 3


@pytest.mark.parametrize(
    "source, expected",
    [
        ("x = 1\ny = x +\n", ["line 2", "SyntaxError"]),
        ("import json\n\nx = nothing\n", ["line 3", "NameError: name 'nothing'"]),
        ("import no_such_module_here\n", ["line 1", "ModuleNotFoundError", "no_such_module_here"]),
        ("import json\njson.loads(\n'{')\n", ["line 2", "JSONDecodeError"]),
        ("raise SystemExit(3)\n", ["line 1", "SystemExit: 3"]),
        ("x = 1\n", ["no function get_config()"]),
        ("get_config = 3\n", ["no function get_config()"]),
        ("def get_config():\n    pass\n", ["returned NoneType", "base_config()"]),
        ("def get_config():\n    return {}\n", ["returned dict", "base_config()"]),
        ("def get_config():\n    a = 1\n    return a / 0\n", ["line 3", "ZeroDivisionError"]),
        ("def get_config(size):\n    pass\n", ["get_config(size)", "needs a variant"]),
        (
            EXPERIMENT + GET_CONFIG.replace("= 1000", "= 1e3"),
            ["line 18", "TypeError", "num_steps", "1000.0"],
        ),
    ],
)
def test_error_in_the_file_is_one_line_with_its_place(write, source, expected):
    path = write(source)
    message = _message(config_file.load, path)
    for part in [path, *expected]:
        assert part in message


def test_unreadable_files_and_unwanted_variants_are_refused(write, tmp_path):
    assert "No such file" in _message(config_file.load, str(tmp_path / "missing.py"))
    assert "Is a directory" in _message(config_file.load, str(tmp_path))
    assert "does not take one" in _message(config_file.load, write() + ":big")
    (tmp_path / "binary.py").write_bytes(b"\xff\x00\x01")
    assert "SyntaxError" in _message(config_file.load, str(tmp_path / "binary.py"))


@pytest.mark.parametrize(
    "experiment, expected",
    [
        ("None", ["experiment", "required", "'package.module:Class'"]),
        ("'Toy'", ["'Toy'", "'package.module:Class'"]),
        ("':Tooy'", ["no class 'Tooy'", "did you mean 'Toy'?"]),
        ("':NotAnExperiment'", ["not an Experiment", "haikutrain.Experiment"]),
        ("':base_config'", ["no class 'base_config'"]),
        ("'no.such.module:Toy'", ["cannot import no.such.module", "ModuleNotFoundError"]),
        ("'json:Toy'", ["json has no class 'Toy'"]),
    ],
)
def test_experiment_that_is_none_is_refused(write, experiment, expected):
    path = write(EXPERIMENT + GET_CONFIG.replace('":Toy"', experiment))
    message = _message(config_file.load, path)
    for part in expected:
        assert part in message


# --- overrides -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "override, field, expected",
    [
        ("--config.num_steps=7", "num_steps", 7),
        ("--config.learning_rate=1", "learning_rate", 1.0),
        ("--config.learning_rate=-1e-3", "learning_rate", -0.001),
        ("--config.augment", "augment", True),
        ("--config.augment=true", "augment", True),
        ("--noconfig.model.head.bias", "model.head.bias", False),
        ("--config.model.width=-3", "model.width", -3),
        ("--config.layers=(1,2,3)", "layers", (1, 2, 3)),
        ("--config.words=a", "words", ("a",)),
        ("--config.eval_every=20", "eval_every", 20),
        ("--config.ema_decay=0.9", "ema_decay", 0.9),
        ("--config.best_metric=test/accuracy", "best_metric", "test/accuracy"),
        ("--config.restore_from=a=b", "restore_from", "a=b"),
    ],
)
def test_override_sets_the_field_with_its_type(write, override, field, expected):
    value = config_file.load(write(), [override]).config
    for part in field.split("."):
        value = value[part]
    assert value == expected
    assert type(value) is type(expected)


def test_last_override_wins(write):
    overrides = ["--config.seed=1", "--config.num_steps=2", "--config.seed=3"]
    config = config_file.load(write(), overrides).config
    assert (config.seed, config.num_steps) == (3, 2)


@pytest.mark.parametrize(
    "override, expected",
    [
        ("--config.num_stpes=3", ["no field 'num_stpes'", "did you mean 'num_steps'?"]),
        ("--config.model.widht=3", ["no field 'widht' in 'model'", "did you mean 'width'?"]),
        ("--config.model.head.bais=1", ["no field 'bais' in 'model.head'", "'bias'"]),
        ("--config.model.qqqqqq=1", ["no field 'qqqqqq'", "there are head, width"]),
        ("--config.lock=1", ["no field 'lock'"]),
        ("--config.=1", ["no field ''"]),
        ("--config.num_steps=abc", ["'num_steps' is an int, not 'abc'"]),
        ("--config.num_steps=1e3", ["'num_steps' is an int, not '1e3'"]),
        ("--config.num_steps=", ["'num_steps' is an int, not ''"]),
        ("--config.learning_rate=fast", ["'learning_rate' is a float, not 'fast'"]),
        ("--config.augment=maybe", ["augment", "maybe"]),
        ("--config.layers=(1,", ["layers", "(1,"]),
        ("--config.layers=(1,x)", ["'(1,x)' is not an element", "like (8, 16)"]),
        ("--config.layers=(1,2.5)", ["2.5 is not an element", "--config.layers='(8, 16)'"]),
        ("--config.words=(a,b)", ["'(a,b)' is not an element", "like ('x', 'y')"]),
        ("--config.names=b", ["'names' is a list", "tuple"]),
        ("--config.untyped=1", ["'untyped' is None and has no type", "placeholder(float)"]),
        ("--config.model={'a':1}", ["'model' is a group of fields", "one by one"]),
        ("--config.seed.x=1", ["'seed' is a value and has no fields"]),
        ("--config.seed", ["give 'seed' a value"]),
        ("--noconfig.seed", ["give 'seed' a value"]),
        ("--config.eval_every=soon", ["'eval_every' is an int, not 'soon'"]),
    ],
)
def test_override_that_fits_no_field_is_refused(write, override, expected):
    message = _message(config_file.load, write(), [override])
    assert override.partition("=")[0].replace("--no", "--") in message
    for part in expected:
        assert part in message


# --- the rules of the base fields ------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"num_steps": None}, ["config.num_steps", "required", "--config.num_steps=VALUE"]),
        ({"batch_size": None}, ["config.batch_size", "required"]),
        ({"num_steps": None, "nmu_steps": 5}, ["num_steps", "'nmu_steps' a misspelling"]),
        ({"seed": None}, ["config.seed", "required"]),
        ({"num_steps": 0}, ["config.num_steps=0", "1 or more"]),
        ({"num_steps": 2**31}, ["2147483648", "below 2**31"]),
        ({"batch_size": -8}, ["config.batch_size=-8", "1 or more"]),
        ({"steps_per_call": 0}, ["config.steps_per_call=0", "1 or more"]),
        ({"accumulate_steps": 0}, ["config.accumulate_steps=0"]),
        ({"log_every": 0}, ["config.log_every=0"]),
        ({"eval_every": -1}, ["config.eval_every=-1"]),
        ({"checkpoint_every": 0}, ["config.checkpoint_every=0"]),
        ({"keep_checkpoints": 0}, ["config.keep_checkpoints=0"]),
        ({"stop_after": 0}, ["config.stop_after=0"]),
        ({"seed": -1}, ["config.seed=-1", "2**32"]),
        ({"seed": 2**32}, ["config.seed=4294967296", "2**32"]),
        ({"num_steps": True}, ["config.num_steps=True", "type int, not bool"]),
        ({"num_steps": 10.0}, ["config.num_steps=10.0", "type int, not float"]),
        ({"best_metric": 3}, ["config.best_metric=3", "type str, not int"]),
        ({"best_metric": ""}, ["config.best_metric=''", "empty"]),
        ({"best_mode": "most"}, ["config.best_mode='most'", "'max' or 'min'"]),
        ({"restore_only": "params"}, ["config.restore_only='params'", "'all' or 'weights'"]),
        ({"restore_only": "weights"}, ["restore_only='weights'", "restore_from"]),
        ({"ema_decay": 0.0}, ["config.ema_decay=0.0", "between 0 and 1"]),
        ({"ema_decay": 1.0}, ["config.ema_decay=1.0", "between 0 and 1"]),
        ({"ema_decay": float("nan")}, ["config.ema_decay=nan"]),
        ({"grad_clip_norm": 0.0}, ["config.grad_clip_norm=0.0", "positive"]),
        ({"grad_clip_norm": float("inf")}, ["config.grad_clip_norm=inf", "positive"]),
        ({"accumulate_steps": 3}, ["config.batch_size=8", "accumulate_steps=3"]),
        ({"steps_per_call": 3}, ["config.steps_per_call=3", "num_steps=1000"]),
        ({"steps_per_call": 4, "stop_after": 6}, ["steps_per_call=4", "stop_after=6"]),
        ({"steps_per_call": 4}, ["steps_per_call=4", "log_every=50"]),
        ({"steps_per_call": 5, "eval_every": 7}, ["steps_per_call=5", "eval_every=7"]),
        ({"steps_per_call": 5, "checkpoint_every": 4}, ["=5", "checkpoint_every=4"]),
    ],
)
def test_broken_rule_is_named_with_field_value_and_fix(changes, expected):
    message = _message(config_lib.validate, _config(**changes))
    for part in expected:
        assert part in message


def test_batch_is_divided_by_the_devices_and_the_accumulated_parts():
    config_lib.validate(_config(batch_size=24, accumulate_steps=3), device_count=8)
    message = _message(config_lib.validate, _config(batch_size=6), device_count=4)
    assert "config.batch_size=6" in message
    assert "4 devices" in message
    message = _message(
        config_lib.validate, _config(batch_size=8, accumulate_steps=2), device_count=8
    )
    assert "multiple of 16" in message


def test_all_options_together_are_accepted():
    config_lib.validate(
        _config(
            steps_per_call=5,
            accumulate_steps=2,
            eval_every=100,
            stop_after=1000,
            best_metric="test/accuracy",
            best_mode="min",
            restore_from="runs/other",
            restore_only="weights",
            precision="params=float32,compute=bfloat16,output=float32",
            ema_decay=0.999,
            grad_clip_norm=1,
            compilation_cache="cache",
            seed=2**32 - 1,
        ),
        device_count=4,
    )


@pytest.mark.parametrize("slip", ["log_evry", "checkpoint_everyy", "eval_evrey", "ema_decoy"])
def test_misspelt_base_field_is_refused(slip):
    assert f"config.{slip} is a new field" in _message(config_lib.validate, _config(**{slip: 7}))


@pytest.mark.parametrize(
    "own", ["seeds", "eval_batch_size", "batch_sizes", "log_every_n", "best_metrics", "step"]
)
def test_own_field_near_a_base_field_is_accepted(own):
    config_lib.validate(_config(**{own: 7}))
    # With the base field set as well, the other name can be no slip.
    config_lib.validate(_config(log_evry=7, log_every=10))


def test_config_without_base_fields_is_refused():
    message = _message(config_lib.validate, ml_collections.ConfigDict({"num_steps": 3}))
    assert "haikutrain.base_config()" in message


# --- from run to run -------------------------------------------------------------------------


def test_resume_may_change_the_periods_and_the_experiments_own_fields():
    before = _config(learning_rate=0.1, nan=float("nan"), old=1, model={"width": 3, "t": (1, 2)})
    after = _config(
        num_steps=2000,
        log_every=1,
        eval_every=5,
        checkpoint_every=7,
        keep_checkpoints=1,
        stop_after=9,
        steps_per_call=1,
        compilation_cache="cache",
        restore_from="elsewhere",
        restore_only="weights",
        learning_rate=0.2,
        nan=float("nan"),
        new=None,
        model={"width": 4, "t": [1, 2]},
    )
    saved = json.loads(json.dumps(config_lib.to_json(before)))
    assert config_lib.check_same_run(saved, before) == []
    assert config_lib.check_same_run(saved, after) == [
        "learning_rate: 0.1 -> 0.2",
        "model.width: 3 -> 4",
        "new: absent -> null",
        "old: 1 -> absent",
    ]


@pytest.mark.parametrize(
    "field, value, shown",
    [
        ("seed", 1, "seed (0 -> 1)"),
        ("batch_size", 16, "batch_size (8 -> 16)"),
        ("accumulate_steps", 2, "accumulate_steps (1 -> 2)"),
        ("best_metric", "loss", 'best_metric (null -> "loss")'),
        ("best_mode", "min", 'best_mode ("max" -> "min")'),
        ("precision", "half", 'precision (null -> "half")'),
        ("ema_decay", 0.9, "ema_decay (null -> 0.9)"),
        ("grad_clip_norm", 1.0, "grad_clip_norm (null -> 1.0)"),
    ],
)
def test_resume_refuses_other_changes_of_the_base_config_by_name(field, value, shown):
    saved = config_lib.to_json(_config())
    assert shown in _message(config_lib.check_same_run, saved, _config(**{field: value}))


def test_resume_names_all_refused_fields_in_one_line():
    saved = config_lib.to_json(_config())
    message = _message(config_lib.check_same_run, saved, _config(seed=4, ema_decay=0.5))
    assert "ema_decay (null -> 0.5), seed (0 -> 4)" in message


def test_json_is_plain_data_and_anything_else_is_named():
    plain = config_lib.to_json(_config(model={"layers": (8, [1]), "f": 1.5, "on": True}))
    assert plain["model"] == {"f": 1.5, "layers": [8, [1]], "on": True}
    assert json.loads(json.dumps(plain)) == plain
    message = _message(config_lib.to_json, _config(model={"layers": (8, {1, 2})}))
    assert "config.model.layers[1]" in message
    assert "set" in message
    unset = ml_collections.config_dict.required_placeholder(int)
    message = _message(config_lib.to_json, _config(model={"width": unset}))
    assert "config.model.width is required" in message


def test_required_placeholder_is_refused_and_references_follow_overrides(write):
    unset = "    config.seed_of_mine = config_dict.required_placeholder(int)\n    return config"
    source = "from ml_collections import config_dict\n" + EXPERIMENT + GET_CONFIG
    path = write(source.replace("    return config", unset))
    assert "placeholder(TYPE)" in _message(config_file.load, path)
    half = "    config.eval_every = config.get_ref('num_steps') // 2\n    return config"
    path = write(source.replace("    return config", half))
    assert config_file.load(path, ["--config.num_steps=60"]).config.eval_every == 30


def test_a_config_file_imports_what_lies_beside_it(tmp_path):
    (tmp_path / "lies_beside.py").write_text("STEPS = 123\n")
    file = tmp_path / "uses_it.py"
    file.write_text(
        "import haikutrain\nimport lies_beside\n\n\n"
        "class Run(haikutrain.Experiment):\n    pass\n\n\n"
        "def get_config():\n"
        "    config = haikutrain.base_config()\n"
        "    config.experiment = ':Run'\n"
        "    config.num_steps = lies_beside.STEPS\n"
        "    return config\n"
    )
    assert config_file.load(str(file)).config.num_steps == 123
