"""The shape of the code: which module imports which, what `import edgeinfer` loads, how long files are."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

import edgeinfer
from edgeinfer.core import errors
from tests.cli import TIME_LIMIT

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("export", "quant", "runtime", "apps")

CORE = {"edgeinfer.core", "edgeinfer.bundle"}
NN = CORE | {"edgeinfer.nn"}
# What each part may import of edgeinfer, by longest matching prefix. Modules of edgeinfer/ not named here are the face.
ALLOWED = {
    "edgeinfer.core": {"edgeinfer.core"},
    # The kernel's library defines the tiles of GGUF's types, and moves blocks into them and back.
    "edgeinfer.bundle": CORE | {"edgeinfer.runtime.native"},
    "edgeinfer.nn": NN,
    "edgeinfer.quant": NN | {"edgeinfer.quant"},
    "edgeinfer.export": NN | {"edgeinfer.quant", "edgeinfer.export"},
    "edgeinfer.runtime": NN | {"edgeinfer.runtime"},
    # How much memory this machine has decides what is fetched; where the kernel runs, GGUF files are prepared for it.
    "edgeinfer.hub": CORE | {"edgeinfer.hub", "edgeinfer.runtime.system", "edgeinfer.runtime.native.library"},
    # The process that converts a checkpoint when it is first asked for; whoever runs a model imports no maker.
    "edgeinfer.tools.conversion": CORE
    | {"edgeinfer.hub", "edgeinfer.runtime.system", "edgeinfer.export", "edgeinfer.tools.checking"},
    # What was made is run once, next to what it was made of.
    "edgeinfer.tools.checking": NN | {"edgeinfer.api", "edgeinfer.model", "edgeinfer.runtime", "edgeinfer.export"},
    # Distilling is measured by the face and done by the export; only the commands know both.
    "edgeinfer.apps.cli": CORE | {"edgeinfer.apps", "edgeinfer.hub", "edgeinfer.export", "edgeinfer.tools"},
    # Benchmarks of what makes bundles, and of other engines on the same weights.
    "edgeinfer.apps.bench": NN | {"edgeinfer.apps", "edgeinfer.export", "edgeinfer.quant"},
    # The server's replies are made by the thread that makes those of event loops.
    "edgeinfer.apps": {
        "edgeinfer.core",
        "edgeinfer.hub",
        "edgeinfer.openai",
        "edgeinfer.apps",
        "edgeinfer.model_thread",
    },
    "edgeinfer.__main__": {"edgeinfer.apps.cli"},
}
NOT_IN_THE_FACE = {"edgeinfer.quant", "edgeinfer.export", "edgeinfer.apps"}
# Making a bundle needs these; running one does not.
HEAVY = {"torch", "transformers", "onnx", "safetensors", "optimum", "ml_dtypes"}
MAKERS = ("edgeinfer.export", "edgeinfer.quant")
# Packages whose names come in when they are asked for.
LAZY = ("edgeinfer", "edgeinfer.hub", "edgeinfer.tools")
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 600, 60
# A shorter module that one other of its folder imports belongs into that one.
LEAST_LINES = 120
# Folders in which each family, method, dialect or command has a file of its own, however short it is.
ONE_FILE_EACH = (
    "edgeinfer.apps.cli",
    "edgeinfer.export.architectures",
    "edgeinfer.export.drafters",
    "edgeinfer.quant",
    "edgeinfer.runtime.kv_cache.context_shift",
    "edgeinfer.runtime.remote",
    "edgeinfer.runtime.research",
    "edgeinfer.runtime.search",
    "edgeinfer.runtime.speculation.drafters",
)
# Short modules with one importer that stay: a backend, and a program that runs in its own process.
ALONE = {"edgeinfer.runtime.backends.onnx.backend", "edgeinfer.runtime.sampling.grammar_trial"}
# Lines of Python that each room may have. A change that needs more lowers another room's limit, or says here why.
BUDGETS = {
    "apps": 20,
    "apps/bench": 4299,  # quality: pieces of any text, sizes, types of llama.cpp, one reading of the reference
    "apps/cli": 4803,  # bits that are chosen; edgeinfer embed; thoughts
    "apps/desktop": 4603,  # GGUF files that are not prepared yet
    "apps/mcp": 637,  # tools of MCP servers for chats, and the model for other programs
    "apps/server": 4929,  # stored responses, background replies, models loaded and fetched, infill; embeddings
    "apps/terminal": 602,  # thoughts
    "edgeinfer": 4875,  # the thread of event loops, of the server until now; encoders as models; thoughts
    "edgeinfer/bundle": 7015,  # what quantizing cost; biases of keys; encoders described
    "edgeinfer/hub": 2170,  # GGUF files: of other programs, in packages, prepared, or why not, planned by sketches
    "edgeinfer/nn": 1030,  # of bundle, quant and the reference backend until now
    "edgeinfer/openai": 4500,  # prompts with a gap, that are scored; 40 forms of calls, read, written and enforced
    "edgeinfer/core": 3006,  # what strategies count is what results say; thoughts
    "edgeinfer/tools": 2683,  # GGUF files are prepared whole or not at all, packages fetched, conversions checked
    "export": 920,  # bundles are checked, and written again where they are too far from the float model
    "export/architectures": 3489,  # families of encoders and rerankers
    "export/drafters": 740,
    "export/gguf": 4900,  # GGUF files on our own kernel: read back into bundles, or sketches of them; bench quality
    "export/graph": 2365,  # GGUF files on our own kernel; graphs of encoders
    "export/options": 436,  # bits that are chosen by what they cost, with a text or by rules
    "export/source": 1390,  # the text that models are calibrated with; sentence-transformers' modules
    "export/training": 3060,
    "export/weights": 434,  # the float model to check with; GGUF files on our own kernel
    "quant": 3010,  # errors fed forward in nine of GGUF's types; bits by predicted loss; columns of huge inputs
    "runtime": 20,
    "runtime/backends": 7265,  # GGUF files on our own kernel; the choice of a backend; encoders on ONNX Runtime
    "runtime/decoding": 1400,  # decoders as embedders
    "runtime/devices": 440,
    "runtime/kv_cache": 1263,
    "runtime/layer_skip": 1260,
    "runtime/native": 800,  # GGUF files on our own kernel
    "runtime/paging": 1150,  # keys less their bias
    "runtime/planning": 1970,  # caches are chosen by what they add, and it is said why not
    "runtime/profile": 1190,  # prices of drafting
    "runtime/remote": 1380,
    "runtime/research": 550,
    "runtime/sampling": 3179,  # llama.cpp's samplers; thoughts
    "runtime/search": 1170,
    "runtime/speculation": 4910,
    "runtime/system": 680,
    "runtime/text": 2751,  # templates in the sandbox of jinja2 as it is; thoughts
    "runtime/tuning": 1120,
    "runtime/weights": 1140,
    "tests": 5237,  # GGUF files on our own kernel; damaged ones with every type; small encoders
    "tests/apps": 15496,  # scores on tasks; settings of a chat are not lost; embeddings; thoughts
    "tests/docs": 830,
    "tests/conformance": 300,  # calls in every form; BFCL
    "tests/edgeinfer": 15663,  # GGUF files: of other programs, in packages, for our own kernel, damaged ones
    "tests/export": 8215,  # GGUF files on our own kernel: every family, both ways; checks after converting; encoders
    "tests/quant": 1720,  # GGUF files on our own kernel: weights in these types
    "tests/runtime": 25382,  # GGUF files on our own kernel; caches of biased keys; thoughts
    "tests/tools": 3676,  # scores on tasks: HumanEval, MBPP, plain questions
    "tests/typing": 300,
}


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


@dataclass(frozen=True)
class Source:
    """What the tests ask of a module's source."""

    lines: int
    docstring: str | None
    # Every module that it imports, wherever in the file; `from a import b` gives a.b if that is a module.
    imports: tuple[str, ...]
    relative: tuple[int, ...]  # lines of imports that begin with a dot
    functions: tuple[tuple[str, int, int], ...]  # names, lines and lengths
    lists_names: bool  # whether it assigns to __all__


@cache
def sources() -> dict[str, Source]:
    """Every module, read and parsed once."""
    return {module: read(path.read_text("utf-8")) for module, path in MODULES.items()}


def read(text: str) -> Source:
    tree = ast.parse(text)
    imports: list[str] = []
    relative: list[int] = []
    functions: list[tuple[str, int, int]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level or node.module is None:
                relative.append(node.lineno)
                continue
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            imports += [name if name in MODULES else node.module for name in names]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append((node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1))
    return Source(
        text.count("\n"),
        ast.get_docstring(tree),
        tuple(imports),
        tuple(relative),
        tuple(functions),
        any(isinstance(node, ast.Assign) and "__all__" in map(ast.unparse, node.targets) for node in tree.body),
    )


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def may_import(module: str, name: str) -> bool:
    if name == "edgeinfer":
        return within(module, "edgeinfer.apps")
    for prefix, allowed in ALLOWED.items():
        if within(module, prefix):
            return any(within(name, target) for target in allowed)
    return not any(within(name, room) for room in NOT_IN_THE_FACE)


def test_modules_are_found() -> None:
    assert {"edgeinfer", "edgeinfer.apps.cli.main", "edgeinfer.quant.gptq", "edgeinfer.apps.server.app"} <= set(MODULES)


def test_imports_are_absolute() -> None:
    relative = [f"{module}:{line}" for module, source in sources().items() for line in source.relative]
    assert relative == []


def test_imports_point_downwards() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, source in sources().items()
        for name in source.imports
        if within(name, "edgeinfer") and not may_import(module, name)
    ]
    assert wrong == []


def room(module: str) -> str:
    """The folder of a module by its import name; core is one room, and files of edgeinfer/ are the face."""
    if within(module, "edgeinfer.core"):
        return "edgeinfer.core"
    if module != "edgeinfer" and MODULES[module].parent == ROOT / "edgeinfer":
        return "face"
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Sets of nodes that reach each other."""
    found: list[list[str]] = []
    reach: dict[str, set[str]] = {}
    for start in arrows:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            ahead += (new := arrows.get(ahead.pop(), set()) - seen)
            seen |= new
        reach[start] = seen
    for node in arrows:
        circle = sorted(other for other in reach[node] if node in reach.get(other, ()))
        if len(circle) > 1 and circle not in found:
            found.append(circle)
    return found


def arrows_between(place: Callable[[str], str]) -> dict[str, set[str]]:
    """Which places import which others, wherever in their files."""
    found: dict[str, set[str]] = {place(module): set() for module in MODULES}
    for module, source in sources().items():
        targets = {place(name) for name in source.imports if name in MODULES}
        found[place(module)] |= targets - {place(module)}
    return found


def test_no_files_import_in_a_circle() -> None:
    assert circles(arrows_between(lambda module: module)) == []


def test_no_folders_import_in_a_circle() -> None:
    # The package itself names what it brings in when that is asked for.
    arrows = arrows_between(room)
    del arrows["edgeinfer"]
    assert circles(arrows) == []


def test_public_classes_have_names_of_their_own() -> None:
    homes: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_only_makers_import_heavy_libraries() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, source in sources().items()
        if not any(within(module, maker) for maker in MAKERS)
        for name in source.imports
        if name.partition(".")[0] in HEAVY
    ]
    assert wrong == []


def modules_after(code: str) -> set[str]:
    """What a new process has imported after some code."""
    command = [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=TIME_LIMIT)
    return set(done.stdout.split())


def test_import_is_light() -> None:
    """The names that are public come in when they are asked for, so nothing has to wait for libraries before."""
    found = modules_after("import edgeinfer") - modules_after("pass")
    ours = {"edgeinfer", "edgeinfer.core", "edgeinfer.core.version"}
    assert {name for name in found if within(name, "edgeinfer")} == ours
    assert {name.partition(".")[0] for name in found} <= sys.stdlib_module_names | {"edgeinfer"}
    # How many of the standard library are there before depends on the environment; of a bare one 32 are new.
    assert len(found) < 40


def test_a_plain_reply_brings_in_nothing_that_it_does_not_use() -> None:
    """Event loops take 4 MB of a budget that may be small; templates, searches and servers take time before the first
    token."""
    code = "import edgeinfer; m = edgeinfer.load(remember=False); m.generate('Once', max_tokens=1)"
    libraries = {"asyncio", "ssl", "difflib", "jinja2", "numpy.random", "huggingface_hub", "importlib.resources"}
    ours = {"openai", "hub.resolving", "bundle.gguf", "runtime.search", "runtime.layer_skip", "runtime.research"}
    ours |= {"runtime.sampling.grammar", "runtime.backends.llamacpp.factory", "runtime.tuning"}
    assert not modules_after(code) & (libraries | {f"edgeinfer.{name}" for name in ours})


def test_nothing_of_the_product_imports_research() -> None:
    research = "edgeinfer.runtime.research"
    importers = {name for name, source in sources().items() if any(within(each, research) for each in source.imports)}
    assert importers and all(within(name, research) for name in importers)


def test_a_command_imports_no_other() -> None:
    found = modules_after("import edgeinfer.apps.cli.main as main; main.build_parser('run')")
    assert "edgeinfer.apps.cli.run" in found
    assert not found & {"edgeinfer.apps.cli.bench", "edgeinfer.apps.cli.distill", "edgeinfer.api", "numpy"}


def test_exported_names() -> None:
    for package in map(import_module, LAZY):
        assert {name for name in dir(package) if not name.startswith("_")} == set(package.__all__)
        assert sorted(package.__all__) == sorted(set(package.__all__))
        for name in package.__all__:
            found = getattr(package, name)
            assert inspect.ismodule(found) or isinstance(found, str) or found.__name__ == name
    classes = {name for name, value in vars(errors).items() if inspect.isclass(value) and name.endswith("Error")}
    assert classes <= set(edgeinfer.__all__)


def test_only_the_face_lists_its_names() -> None:
    """Elsewhere a name with an underscore is private, and every other one may be imported."""
    assert [module for module, source in sources().items() if source.lists_names and module not in LAZY] == []


def test_no_merge_left_its_marks() -> None:
    """Python would not start with one; scripts, styles and pages would not work."""
    kinds = {".c", ".css", ".h", ".html", ".js", ".json", ".md", ".py", ".toml"}
    paths = [path for room in ("edgeinfer", *ROOMS, "tests", "docs") for path in (ROOT / room).rglob("*.*")]
    texts = {path for path in paths if path.suffix in kinds and path.is_file()}
    assert len(texts) > 1000
    assert [path.name for path in texts if "\n<<<<<<< " in path.read_text("utf-8", errors="replace")] == []


def test_modules_say_what_they_own() -> None:
    assert [module for module, source in sources().items() if not source.docstring] == []


def test_files_and_functions_are_short() -> None:
    long = {module: source.lines for module, source in sources().items() if source.lines > MOST_LINES}
    for module, source in sources().items():
        for name, line, length in source.functions:
            if length > MOST_LINES_OF_A_FUNCTION:
                long[f"{module}:{line} {name}"] = length
    assert long == {}


def test_rooms_keep_to_their_lines() -> None:
    lines: Counter[str] = Counter()
    for path in [*MODULES.values(), *(ROOT / "tests").rglob("*.py")]:
        folders = path.relative_to(ROOT).parts[:-1]
        lines["/".join(folders[:2])] += path.read_text("utf-8").count("\n")
    assert {room: count for room, count in lines.items() if count > BUDGETS.get(room, 0)} == {}
    assert set(BUDGETS) <= set(lines), "a room that is gone has no lines"


def test_no_module_is_a_fragment_of_another() -> None:
    importers: dict[str, set[str]] = {}
    for module, source in sources().items():
        for name in {*source.imports} - {module}:
            importers.setdefault(name, set()).add(module)
    short = [module for module, source in sources().items() if source.lines < LEAST_LINES and module not in ALONE]
    fragments = [
        f"{module} belongs into {importer}"
        for module in short
        if len(importers.get(module, ())) == 1 and not any(within(module, folder) for folder in ONE_FILE_EACH)
        for importer in importers[module]
        if MODULES[module].name != "__init__.py" and MODULES[importer].parent == MODULES[module].parent
    ]
    assert fragments == []
