"""Imports go one way, and each third-party library has one door."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "simulator"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Leftmost first: a module may import from its own layer and from those before it.
LAYERS = (
    ("units", "errors", "wire"),
    ("budget", "pool"),
    ("kernels",),
    ("program", "timeline", "files"),
    ("traffic", "pauses"),
    ("schedules", "program_text"),
    ("describe",),
    ("lower",),
    ("hardware",),
    ("engine",),
    ("exchange",),
    ("report",),
    ("api", "cuts"),
    ("operate", "jitter"),
    ("explore",),
    ("validate",),
    ("cli",),
    ("__init__", "__main__"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

DOORS = {
    "click": {f"cli/{path.name}" for path in (PACKAGE / "cli").glob("*.py")},
    "numba": {"kernels/jit.py"},
    "networkx": {"hardware/fabric.py"},
    "matplotlib": {
        "report/plots.py", "report/memory_plot.py", "report/loader_plot.py",
        "report/network_plots.py", "report/palette.py", "report/roofline_plot.py",
        "report/density_plot.py",
        "validate/scatter.py", "validate/torch/plot.py",
        "operate/plot.py", "jitter/plot.py", "explore/schedules_plot.py",
        "explore/search_plot.py", "explore/whatif_plot.py", "explore/compare/plot.py",
        "explore/sweep/scaling_plot.py", "explore/sweep/bubble_plot.py",
        "explore/sweep/cost_plot.py",
    },
    "joblib": {"pool.py", "explore/sweep/pools.py"},
    "distributed": {"explore/sweep/pools.py"},
    "optuna": {"explore/tpe.py"},
    "pandas": {"report/result.py", "explore/sweep/frame.py"},
    "torch": {"exchange/module.py", "exchange/module_counts.py", *(
        f"validate/torch/{name}.py" for name in
        ("allocation", "device", "executor", "kernels", "measure", "model", "peers", "worker"))},
    "simpy": {"engine/reference.py", "engine/contention.py", "operate/reference.py"},
}  # fmt: skip
EVERYWHERE = {"numpy"}


def imports(path):
    """Yield (module, whether only for types) of every import of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in for_types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module, id(node) in for_types


def layer(path):
    return LEVEL[path.relative_to(PACKAGE).parts[0].removesuffix(".py")]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_only_from_its_left(path):
    for name, _ in imports(path):
        first, *rest = name.split(".")
        if first == "simulator" and rest:
            assert LEVEL[rest[0]] <= layer(path), f"{path.name} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_library_enters_by_its_own_door(path):
    here = str(path.relative_to(PACKAGE))
    for name, only_types in imports(path):
        library = name.split(".")[0]
        if (
            library in sys.stdlib_module_names
            or library in {"simulator", *EVERYWHERE}
            or only_types
        ):
            continue
        assert here in DOORS.get(library, ()), f"{here} imports {library}"


def loaded_after(statement):
    code = f"import sys; {statement}; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_no_heavy_library():
    heavy = {"numpy", "numba", "pandas", "matplotlib", "simpy", "click", "torch", "networkx"}
    assert not heavy & loaded_after("import simulator")


def test_the_help_of_the_command_line_needs_no_numpy():
    assert not {"numpy", "pandas", "simpy"} & loaded_after("import simulator.cli")


def test_simulating_loads_neither_pandas_nor_matplotlib():
    code = "import simulator; simulator.simulate_schedule('1F1B', stages=2, microbatches=2)"
    assert not {"numba", "pandas", "matplotlib", "networkx"} & loaded_after(code)


def test_simulating_a_scenario_loads_no_networkx():
    code = "import simulator; simulator.simulate(simulator.load('gpt2-xl-1gpu'))"
    assert "networkx" not in loaded_after(code)


def test_the_public_names_are_these():
    import simulator

    assert sorted(simulator.__all__) == [
        "Cluster", "DeadlockError", "DescriptionError", "Device", "Link", "Model", "Nic", "Node",
        "Plan", "Program", "ProgramError", "Result", "Run", "Scenario", "ScheduleError",
        "Timeline", "TrainsimError", "load", "register_schedule", "simulate",
        "simulate_schedule", "sweep",
    ]  # fmt: skip


def test_every_public_name_can_be_had():
    import simulator

    assert all(getattr(simulator, name) is not None for name in simulator.__all__)
