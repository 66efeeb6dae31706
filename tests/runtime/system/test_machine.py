"""What the machine has, found without psutil where that is possible, and equal to what psutil says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from edgeinfer.runtime.system import machine
from edgeinfer.runtime.system.machine import free_memory, machine_memory, physical_cores
from tests.cli import TIME_LIMIT


def test_cores_are_those_of_psutil() -> None:
    assert physical_cores() == (psutil.cpu_count(logical=False) or 1)


def test_memory_is_what_is_built_in_or_less() -> None:
    assert 0 < machine_memory() <= psutil.virtual_memory().total


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has control groups")
def test_memory_that_is_free_is_the_machines_and_the_groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pages of files do not count as taken, whichever kind the group is of, and groups around it count as well."""
    assert 0 < free_memory() <= machine_memory()
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    groups = tmp_path / "groups"
    monkeypatch.setattr(machine, "_GROUPS", groups)
    monkeypatch.setattr(machine, "_MOUNTS", {"": (tmp_path, "memory.max"), "memory": (tmp_path, "limit")})
    for line, name in (("0::/outer/inner", "memory.max"), ("4:memory:/outer/inner", "limit"), ("0::/", "limit")):
        groups.write_text(f"5:cpu:/elsewhere\n{line}\n")
        for group in (inner, inner.parent, tmp_path) if "outer" in line else (tmp_path,):
            (group / name).write_text("300000000\n")
            assert machine_memory() == 300_000_000
            for statistics, taken in (("anon 100\nfile 200\n", 100), ("rss 7\ntotal_rss 90\n", 90), ("", 0)):
                (group / "memory.stat").write_text(statistics)
                assert free_memory() == 300_000_000 - taken
            # Of files that the process has mapped the group need not count all.
            for mapped, counted in ((500, 500), (500, 800), (500, 200), (0, 200)):
                (group / "memory.stat").write_text(f"anon 100\nfile 900\nfile_mapped {counted}\n")
                assert free_memory(mapped) == 300_000_000 - 100 + max(0, mapped - counted)
            (group / name).unlink()
    groups.unlink()
    assert 0 < free_memory() <= machine_memory()


def test_where_the_system_says_nothing_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_CPUS", Path("/nowhere"))
    assert physical_cores() >= 1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have to be asked through psutil")
def test_loading_takes_no_modules_that_linux_does_without() -> None:
    code = """
import sys
there = set(sys.modules)  # what tools bring that look into all processes of the tests
import edgeinfer
edgeinfer.load(remember=False).generate("a", max_tokens=1)
print(sorted({"psutil", "email", "importlib.metadata", "ssl", "socket"} & (set(sys.modules) - there)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=TIME_LIMIT)
    assert done.stdout.strip() == "[]"
