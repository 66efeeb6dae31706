"""What the machine has, found without psutil where that is possible, and equal to what psutil says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

from edgeinfer.runtime.system import machine
from edgeinfer.runtime.system.machine import free_memory, machine_memory, pinning, usable_cores
from tests.cli import TIME_LIMIT


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
    monkeypatch.setattr(machine, "_MOUNT", tmp_path)
    old = tmp_path / "memory" / "outer" / "inner"
    old.mkdir(parents=True)
    limit = "memory.limit_in_bytes"
    for line, name, own in (
        ("0::/outer/inner", "memory.max", (inner, inner.parent, tmp_path)),
        ("4:memory:/outer/inner", limit, (old, old.parent, tmp_path / "memory")),
        ("0::/", limit, (tmp_path / "memory",)),
    ):
        groups.write_text(f"5:cpu:/elsewhere\n{line}\n")
        for group in own:
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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process choose its processors so")
def test_cores_are_those_that_the_process_may_use() -> None:
    assert 1 <= usable_cores() <= (psutil.cpu_count(logical=False) or 1)
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {max(before)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_where_the_system_says_nothing_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_CPUS", Path("/nowhere"))
    assert usable_cores() >= 1
    monkeypatch.setattr(machine, "usable_processors", lambda: (3,))
    assert usable_cores() == 1


def quotas(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has control groups")
def test_cores_are_no_more_than_the_groups_have_time_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Limits of cgroup 2 and 1, of the process's own group and those around it, rounded down, at least one."""
    groups = tmp_path / "groups"
    monkeypatch.setattr(machine, "_GROUPS", groups)
    monkeypatch.setattr(machine, "_cores", lambda: list(range(8)))
    monkeypatch.setattr(machine, "_fast", lambda cores: cores)
    second, first = tmp_path / "second", tmp_path / "first"
    # The name of the folder and that in the list may have their controllers in another order.
    old = first / "cpu,cpuacct"
    for mount, lines in (
        (second, ["0::/outer/inner"]),
        (second, []),  # as in a container whose own group is the mount, or that hides what it is
        (first, ["3:cpuset:/elsewhere", "2:cpu,cpuacct:/outer/inner", "1:name=systemd:/x"]),
        (first, ["2:cpuacct,cpu:/docker/0123"]),
    ):
        groups.write_text("\n".join(lines))
        monkeypatch.setattr(machine, "_MOUNT", mount)
        root = old if mount == first else mount
        own = [root / "outer" / "inner", root / "outer", root] if "outer" in str(lines) else [root]
        for folder in own:
            for share, cores in ((None, 8), (4, 4), (2.5, 2), (0.5, 1), (0.01, 1), (64, 8)):
                quota = None if share is None else round(share * 100_000)
                if mount == second:
                    quotas(folder, cpu_max=f"{quota or 'max'} 100000")
                else:
                    quotas(folder, cpu_cfs_quota_us=str(quota or -1), cpu_cfs_period_us="100000")
                assert usable_cores() == cores
            for file in folder.glob("cpu.*"):
                file.unlink()
    for broken in ("", "max", "100000 0", "a b", "1 2 3"):
        quotas(second, cpu_max=broken)
        monkeypatch.setattr(machine, "_MOUNT", second)
        assert usable_cores() == 8


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


@pytest.fixture
def hybrid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two fast cores of two threads each, numbered first and last, and two slow ones of one."""
    cores = {0: "0-1", 1: "0-1", 2: "2", 3: "3", 4: "4-5", 5: "4-5"}
    for processor, siblings in cores.items():
        folder = tmp_path / f"cpu{processor}"
        (folder / "topology").mkdir(parents=True)
        (folder / "cpufreq").mkdir()
        (folder / "topology" / "thread_siblings_list").write_text(siblings + "\n")
        (folder / "cpufreq" / "cpuinfo_max_freq").write_text("2000000\n" if processor in (2, 3) else "5000000\n")
    monkeypatch.setattr(machine, "_CPUS", tmp_path)
    monkeypatch.setattr(machine, "usable_processors", lambda: tuple(cores))
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path


def test_one_processor_of_each_core_the_fastest_first(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The calling thread is free; the others are counted from 1.
    assert [pinning(n) for n in (1, 2, 3, 4, 5)] == ["", "5", "5;3", "5;3;4", ""]
    monkeypatch.setattr(machine, "usable_processors", lambda: (1, 2, 3))
    assert [pinning(n) for n in (2, 3, 4)] == ["3", "3;4", ""]


def test_capacities_tell_more_than_frequencies(hybrid: Path) -> None:
    for processor in range(6):
        (hybrid / f"cpu{processor}" / "cpu_capacity").write_text("1024" if processor in (2, 3) else "400")
    assert pinning(2) == "4" and pinning(3) == "4;1"


def test_nothing_is_pinned_where_cores_are_not_known(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (hybrid / "cpu3" / "topology" / "thread_siblings_list").unlink()
    assert pinning(2) == ""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert pinning(2) == ""


def cores_of(monkeypatch: pytest.MonkeyPatch, allowed: Iterable[int] = range(6)) -> int:
    monkeypatch.setattr(machine, "usable_processors", lambda: tuple(allowed))
    monkeypatch.setattr(machine, "_MOUNT", Path("/nowhere"))
    return usable_cores()


def test_slow_cores_do_not_count_beside_fast_ones(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Threads of one core count once; where only slow ones are allowed, these do.
    for allowed, cores in ((range(6), 2), ((0, 2, 3), 1), ((0, 1), 1), ((2, 3), 2), ((3,), 1), ((1, 4), 2)):
        assert cores_of(monkeypatch, allowed) == cores
    # Turbo frequencies of one kind differ a little.
    (hybrid / "cpu4" / "cpufreq" / "cpuinfo_max_freq").write_text("4600000\n")
    assert cores_of(monkeypatch) == 2
    # Capacities that are all alike tell nothing; others tell more than frequencies: large, middle and small cores.
    for processor in range(6):
        (hybrid / f"cpu{processor}" / "cpu_capacity").write_text("1024\n")
    assert cores_of(monkeypatch) == 2
    for processor, capacity in enumerate((380, 380, 1024, 760, 380, 380)):
        (hybrid / f"cpu{processor}" / "cpu_capacity").write_text(f"{capacity}\n")
    assert cores_of(monkeypatch) == 2 and cores_of(monkeypatch, (0, 1, 4, 5)) == 2
    # Intel's name theirs.
    named = hybrid / "cpus"
    monkeypatch.setattr(machine, "_PERFORMANCE", named)
    for text, cores in (("0-1,4-5", 2), ("0-3", 3), ("2", 1), ("9-12", 4), ("", 4), ("?", 2)):
        named.write_text(f"{text}\n")
        assert cores_of(monkeypatch) == cores


def test_machines_of_one_kind_of_core_use_all(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for processor in range(6):
        (hybrid / f"cpu{processor}" / "cpufreq" / "cpuinfo_max_freq").unlink()
    assert cores_of(monkeypatch) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="looks where onnxruntime keeps its identifier on Linux")
def test_onnxruntime_leaves_no_identifier_of_the_device(tmp_path: Path) -> None:
    """It would report to its makers, from its import on."""
    environment = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    code = "import edgeinfer; edgeinfer.load(context=64, native=None).generate('Once', max_tokens=2)"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=TIME_LIMIT)
    kept = [path.relative_to(tmp_path) for path in tmp_path.rglob("*")]
    assert [path for path in kept if "onnxruntime" in str(path).lower() or path.name == "deviceid"] == []
