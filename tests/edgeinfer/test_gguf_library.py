"""What is refused before llama.cpp runs anything, and what it says when it fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from ctypes import c_void_p
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.bundle.gguf import library
from edgeinfer.bundle.gguf.library import extra_buffer_types, functions
from edgeinfer.core.errors import UsageError
from tests.cli import TIME_LIMIT
from tests.tables import each_row


def found_at(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
    spec = None
    if folder is not None:
        spec = ModuleSpec("llama_cpp", None)
        spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(library, "find_spec", lambda name: spec)


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    found_at(monkeypatch, None)
    with pytest.raises(UsageError, match=r"not installed.*eight minutes.*C\+\+ compiler"):
        library._checked.__wrapped__()


@each_row("line", ['__version__ = "0.3.35"', '__version__ = "0.4.0"', ""])
def test_other_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str) -> None:
    found_at(monkeypatch, tmp_path)
    (tmp_path / "__init__.py").write_text(line)
    with pytest.raises(UsageError, match=r"does not support.*>=0\.3\.36,<0\.3\.37"):
        library._checked.__wrapped__()


def test_a_package_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found_at(monkeypatch, tmp_path)
    with pytest.raises(UsageError, match="cannot be read"):
        library._checked.__wrapped__()


@pytest.mark.gguf
class TestInstalled:
    """With the library itself."""

    @pytest.fixture(autouse=True)
    def _lib(self) -> None:
        pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

    def test_other_layouts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lib = library.llama_library()
        params: Any = lib.llama_context_default_params()
        params.n_batch, params.type_v = 7, 9
        with pytest.raises(UsageError, match=r"laid out differently \(n_batch, type_v\)"):
            library._check_layout("context", params, library._CONTEXT_DEFAULTS)

    @pytest.mark.parametrize("asked", ["", "ACTIVE"])
    def test_threads_that_wait_soon_sleep(self, asked: str) -> None:
        """Threads that spin take the processor from what they wait for: 13 s for a reply where one thread took 1 s."""
        code = (
            "import os; from edgeinfer.bundle.gguf.library import llama_library as load; load();"
            "print(os.environ.get('OMP_WAIT_POLICY'), os.environ.get('GOMP_SPINCOUNT'))"
        )
        env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
        env |= {"OMP_DISPLAY_ENV": "VERBOSE"} | ({"OMP_WAIT_POLICY": asked} if asked else {})
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=TIME_LIMIT, check=True
        )
        if "OPENMP DISPLAY" not in done.stderr:
            pytest.skip("llama.cpp was compiled without GNU's OpenMP")
        spins = re.search(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
        assert spins is not None and (spins[1] == "1000") == (not asked)
        # What the user's other programs inherit is not touched.
        assert done.stdout.split() == [asked or "None", "None"]

    def test_a_smoke_test_that_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lib = library.llama_library()
        assert library.smoke_test(lib) == ""
        monkeypatch.setattr(library, "_NEAR", -1.0)
        assert "other logits" in library.smoke_test(lib)
        monkeypatch.setattr(library, "tiny_gguf", lambda: b"GGUF")
        assert "cannot load" in library.smoke_test(lib)
        monkeypatch.setattr(library, "_imported", lambda: lib)
        with pytest.raises(UsageError, match=r"does not work here: it cannot load"):
            library._checked.__wrapped__()

    def test_the_first_error_is_told(self, tmp_path: Path) -> None:
        lib = library.llama_library()
        library.logged_error()
        (tmp_path / "x.gguf").write_bytes(library.tiny_gguf().replace(b"blk.0.attn_q", b"blk.0.attn_x"))
        assert not lib.llama_model_load_from_file(str(tmp_path / "x.gguf").encode(), lib.llama_model_default_params())
        assert library.logged_error() == "tensor 'blk.0.attn_q.weight' not found"
        assert library.logged_error() == ""

    def test_the_order_of_amx_is_never_chosen(self) -> None:
        ggml = functions(library.llama_library()._lib._name)
        kinds, names = extra_buffer_types(ggml), list[bytes]()
        while kinds is not None and kinds[len(names)]:
            names.append(ggml.ggml_backend_buft_name(c_void_p(kinds[len(names)])))
        assert b"AMX" not in names
