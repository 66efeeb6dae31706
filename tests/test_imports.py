"""The shape of the code: who imports whom, how heavy `import edgeinfer` is, how long files and functions are."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import edgeinfer

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("export", "quant", "runtime", "apps")

CHECKED = {"edgeinfer.errors", "edgeinfer.option_checks"}
ASKED = {"edgeinfer.adaptive", "edgeinfer.searching"}
CORE = {"edgeinfer.errors", "edgeinfer.config", "edgeinfer.results", "edgeinfer.bundle", "edgeinfer.version"} | ASKED
# What each part may import of edgeinfer, by longest matching prefix. Modules of edgeinfer/ not named here are the face.
ALLOWED = {
    "edgeinfer.errors": set[str](),
    "edgeinfer.version": set[str](),
    "edgeinfer.option_checks": {"edgeinfer.errors"},
    "edgeinfer.adaptive": CHECKED,
    "edgeinfer.searching": CHECKED,
    "edgeinfer.config": CHECKED | ASKED,
    "edgeinfer.results": {"edgeinfer.errors"} | ASKED,
    "edgeinfer.bundle": CORE,
    "edgeinfer.quant": CORE | {"edgeinfer.quant"},
    "edgeinfer.export": CORE | {"edgeinfer.quant", "edgeinfer.export"},
    "edgeinfer.runtime": CORE | {"edgeinfer.runtime"},
    "edgeinfer.hub": CORE | {"edgeinfer.hub"},
    # Benchmarks of what makes bundles, and of other engines on the same weights.
    "edgeinfer.apps.bench": CORE | {"edgeinfer.apps", "edgeinfer.openai", "edgeinfer.export", "edgeinfer.quant"},
    "edgeinfer.apps": {
        "edgeinfer.errors",
        "edgeinfer.config",
        "edgeinfer.results",
        "edgeinfer.hub",
        "edgeinfer.openai",
        "edgeinfer.apps",
    },
    "edgeinfer.__main__": {"edgeinfer.cli"},
    # Distilling is measured by the face and done by the export; only the commands know both.
    "edgeinfer.cli": CORE
    | {"edgeinfer.cli", "edgeinfer.apps", "edgeinfer.hub", "edgeinfer.export", "edgeinfer.distilling"},
}
NOT_IN_THE_FACE = {"edgeinfer.quant", "edgeinfer.export", "edgeinfer.apps", "edgeinfer.cli"}
# Making a bundle needs these; running one does not.
HEAVY = {"torch", "transformers", "onnx", "safetensors", "optimum", "ml_dtypes"}
MAKERS = ("edgeinfer.export", "edgeinfer.quant")


def modules() -> Iterator[tuple[str, Path]]:
    """Every module by its import name."""
    for folder in ("edgeinfer", *ROOMS):
        for base, folders, files in os.walk(ROOT / folder):
            folders[:] = [name for name in folders if name != "__pycache__"]
            for name in files:
                if name.endswith(".py"):
                    path = Path(base, name)
                    parts = path.relative_to(ROOT).with_suffix("").parts
                    parts = parts if folder == "edgeinfer" else ("edgeinfer", *parts)
                    yield ".".join(parts).removesuffix(".__init__"), path


MODULES = dict(sorted(modules()))
each_module = pytest.mark.parametrize("module", MODULES)


def parse(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text("utf-8"))


def imported(module: str) -> Iterator[str]:
    """Every module that the source imports, wherever in the file; `from a import b` gives a.b if that is a module."""
    for node in ast.walk(parse(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import in line {node.lineno}"
            assert node.module is not None
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else node.module


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def may_import(module: str, name: str) -> bool:
    if name == "edgeinfer":
        return within(module, "edgeinfer.cli") or within(module, "edgeinfer.apps")
    for prefix, allowed in ALLOWED.items():
        if within(module, prefix):
            return any(within(name, target) for target in allowed)
    return not any(within(name, room) for room in NOT_IN_THE_FACE)


@each_module
def test_imports_point_downwards(module: str) -> None:
    wrong = [name for name in imported(module) if within(name, "edgeinfer") and not may_import(module, name)]
    assert wrong == []


@each_module
def test_only_makers_import_heavy_libraries(module: str) -> None:
    if any(within(module, maker) for maker in MAKERS):
        return
    assert {name.partition(".")[0] for name in imported(module)} & HEAVY == set()


def test_import_is_light() -> None:
    code = f"import sys, edgeinfer; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_command_imports_no_other() -> None:
    code = "import sys, edgeinfer.cli.main as main; main.build_parser('run'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "edgeinfer.cli.run" in imported
    assert not imported & {"edgeinfer.cli.bench", "edgeinfer.cli.distill", "edgeinfer.api", "numpy"}


def test_import_is_fast() -> None:
    def seconds() -> float:
        command = [sys.executable, "-X", "importtime", "-c", "import edgeinfer"]
        report = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stderr
        found = re.search(r"\|\s*(\d+) \| edgeinfer$", report, re.MULTILINE)
        assert found is not None
        return int(found.group(1)) / 1e6

    assert min(seconds() for _ in range(3)) < 0.3


def test_exported_names() -> None:
    public = {
        name
        for name in dir(edgeinfer)
        if not name.startswith("_") and not inspect.ismodule(vars(edgeinfer).get(name)) and name not in FROM_IMPORTS
    }
    assert public == set(edgeinfer.__all__)
    assert sorted(edgeinfer.__all__) == sorted(set(edgeinfer.__all__))
    for name in edgeinfer.__all__:
        assert getattr(edgeinfer, name).__name__ == name


# What `from ... import` leaves in the module itself.
FROM_IMPORTS = {"annotations", "import_module", "TYPE_CHECKING", "Any", "VERSION"}


@each_module
def test_all_lists_what_is_there(module: str) -> None:
    tree = parse(module)
    if module == "edgeinfer":
        return  # lazy: test_exported_names looks there
    listed = [name for node in tree.body if isinstance(node, ast.Assign) for name in listing(node)]
    defined = {name for node in tree.body for name in names_of(node)}
    assert [name for name in listed if name not in defined] == []


def listing(node: ast.Assign) -> list[str]:
    """What the statement assigns to __all__."""
    if any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets):
        names: list[str] = ast.literal_eval(node.value)
        return names
    return []


def names_of(node: ast.stmt) -> Iterator[str]:
    """Names that a statement at the top of a module binds."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    else:
        yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


@each_module
def test_modules_say_what_they_own(module: str) -> None:
    assert ast.get_docstring(parse(module)), f"{module} does not open with a docstring"


@each_module
def test_files_and_functions_are_short(module: str) -> None:
    assert MODULES[module].read_text("utf-8").count("\n") <= 400
    functions = [n for n in ast.walk(parse(module)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {f"{f.name} (line {f.lineno})": (f.end_lineno or f.lineno) - f.lineno + 1 for f in functions}
    assert {name: length for name, length in lengths.items() if length > 60} == {}
