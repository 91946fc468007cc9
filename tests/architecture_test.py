"""The structure holds: imports point down, each dependency has one door, files stay small."""

import ast
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "haikutrain"
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))

# From the top down: a module imports only from layers below its own. `__init__` names all.
LAYERS = [
    {"main", "inspect", "launch"},
    {"check"},
    {"check_cost"},
    {"check_devices", "check_evaluation", "check_replicas", "check_update"},
    {"check_data", "check_runs", "check_watch"},
    {"follow", "loop"},
    {"evaluation", "saving"},
    {"start"},
    {"programs"},
    {"eval_feed", "experiment", "feed"},
    {"check_trace"},
    {"staging", "updates"},
    {"shared_reading"},
    {"devices", "checkpoint", "hooks"},
    {"checkpoint_process"},
    {"checkpoint_child"},
    {"checkpoint_store"},
    {"checkpoint_retention"},
    {"collectives", "returned", "checkpoint_folder", "data", "pipeline", "precision"},
    {"leaves", "positions", "metrics", "command_line", "config_file"},
    {"augment", "compiled", "config", "optimizers", "readers", "train_state", "workdir", "writers"},
    {"console", "nonfinite", "pictures", "prefetch", "pixels", "processes", "schedules", "sources"},
    {"check_table", "cluster", "job"},
    {"hub"},
    {"wire"},
    {"channel", "errors", "growing_file", "os_errors", "shared_memory", "signals"},
]

# Who may import a library, where it is not everyone.
DOORS = {
    "orbax": {"checkpoint_store"},
    "tensorboardX": {"writers"},
    "rich": {"console", "inspect"},
    "PIL": {"sources"},
    "jmp": {"precision"},
    "grain": {"pipeline"},
    "isal": {"leaves"},
    "array_record": {"sources"},
    "matplotlib": set(),
    "tensorflow": set(),
    "torch": set(),
    "flax": set(),
}


def tree(module):
    return ast.parse((PACKAGE / f"{module}.py").read_text())


def imports(module):
    """(what is imported, whether at the top level) of every import statement."""
    top = set(tree(module).body)
    nodes = list(ast.walk(tree(module)))
    top_lines = {node.lineno for node in top if isinstance(node, ast.Import | ast.ImportFrom)}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno in top_lines
        elif isinstance(node, ast.ImportFrom):
            if node.module == "haikutrain":
                for alias in node.names:
                    yield f"haikutrain.{alias.name}", node.lineno in top_lines
            else:
                yield node.module, node.lineno in top_lines


def own_imports(module):
    names = (name for name, _ in imports(module) if name.startswith("haikutrain"))
    return {name.split(".")[1] for name in names if "." in name}


def test_every_module_has_a_layer():
    layered = [module for layer in LAYERS for module in layer]
    assert sorted(layered) == sorted(set(MODULES) - {"__init__"})


@pytest.mark.parametrize("module", [m for m in MODULES if m != "__init__"])
def test_imports_point_down(module):
    level = next(i for i, layer in enumerate(LAYERS) if module in layer)
    below = set().union(*LAYERS[level + 1 :])
    assert own_imports(module) <= below


@pytest.mark.parametrize("module", MODULES)
def test_one_door_per_dependency(module):
    libraries = {name.split(".")[0] for name, _ in imports(module)}
    for library, doors in DOORS.items():
        assert library not in libraries or module in doors, f"{module} imports {library}"


def names_used(module):
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"


@pytest.mark.parametrize("module", MODULES)
def test_pmap_and_distributed_have_one_door_each(module):
    used = set(names_used(module))
    assert module == "devices" or not {"jax.pmap", "jax.device_put"} & used
    assert module == "processes" or "jax.distributed" not in used


@pytest.mark.parametrize("module", MODULES)
def test_files_and_functions_are_small(module):
    assert len((PACKAGE / f"{module}.py").read_text().splitlines()) <= 350
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.FunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= 60, f"{module}.{node.name} has {lines} lines"


@pytest.mark.parametrize("module", MODULES)
def test_every_module_and_public_name_has_a_docstring(module):
    parsed = tree(module)
    assert ast.get_docstring(parsed)
    for node in parsed.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{module}.{node.name}"


def test_the_public_names_are_one_sorted_list_that_exists():
    import haikutrain

    assert haikutrain.__all__ == sorted(haikutrain.__all__)
    assert all(hasattr(haikutrain, name) for name in haikutrain.__all__)


def test_import_starts_no_backend_and_loads_no_tensorboard_rich_or_matplotlib():
    # Haiku imports flax where it is installed, and flax imports rich: that is not ours.
    code = """
import sys
sys.modules["flax"] = None
import haikutrain
from jax._src import xla_bridge
loaded = {"tensorboardX", "tensorboard", "rich", "matplotlib", "orbax"} & set(sys.modules)
print(loaded or "none", xla_bridge.backends_are_initialized())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["none", "False"]
