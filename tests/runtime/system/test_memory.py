"""Pages of mapped files: released when unchanged, kept when written to; and what the process measures of itself."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.runtime.system.memory import MappedFile, process_memory, release_code, release_freed, return_large_frees
from tests.waiting import TIME_LIMIT

SIZE = 32 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    return path


def touch(pages: mmap.mmap) -> int:
    return sum(pages[i] for i in range(0, SIZE, mmap.PAGESIZE))


@linux
def test_pages_of_an_unchanged_file_are_released_and_come_back(path: Path) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        mapped = MappedFile(path)
        seen = touch(pages)
        before = process_memory()
        mapped.release()
        after = process_memory()
        assert before.file - after.file > 0.9 * SIZE
        assert after.rss < before.rss
        assert touch(pages) == seen


@linux
def test_a_part_of_a_file_is_released_alone(path: Path) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        part = MappedFile(path).part([(SIZE // 4, SIZE // 4), (SIZE - 100, 100), (2 * SIZE, 5)])
        touch(pages)
        before = process_memory().file
        part.release()
        released = before - process_memory().file
        # The system may have mapped pieces of 2 MB, which go whole.
        assert 0.9 * SIZE // 4 < released < SIZE // 4 + (5 << 20)
        part.part([(0, SIZE // 8)]).release()
        assert before - process_memory().file == pytest.approx(released, abs=1 << 20)


@linux
def test_pages_that_were_written_to_are_kept(path: Path) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as pages:
        pages[5] = 77
        MappedFile(path).release()
        assert pages[5] == 77


@linux
def test_code_is_released_and_comes_back() -> None:
    before = process_memory()
    release_code()
    after = process_memory()
    assert before.file - after.file > 5_000_000
    assert np.linalg.solve(np.eye(3) * 2, np.ones(3)).tolist() == [0.5, 0.5, 0.5]
    assert process_memory().file < before.file


@linux
def test_data_that_is_mapped_is_no_code(path: Path) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        touch(pages)
        release_code()
        assert process_memory().file > 0.9 * SIZE


def test_a_file_that_is_not_mapped(path: Path) -> None:
    MappedFile(path).release()


def test_the_process_measures_itself() -> None:
    memory = process_memory()
    assert 0 < memory.anonymous <= memory.rss <= memory.peak_rss
    assert memory.anonymous + memory.file == pytest.approx(memory.rss, rel=0.05)


@linux
def test_large_blocks_go_back_to_the_system_when_freed() -> None:
    return_large_frees()
    before = process_memory().anonymous
    block = bytearray(b"x" * SIZE)
    assert process_memory().anonymous - before > 0.9 * SIZE
    del block
    release_freed()
    assert process_memory().anonymous - before < 0.2 * SIZE


# In a process of its own: holes in a heap that other tests have left serve blocks as kept ones do.
_FAULTS = """
import mmap
from pathlib import Path
from edgeinfer.runtime.system.memory import keeping_freed, process_memory, return_large_frees
return_large_frees()
BLOCK, ROUNDS = 8 << 20, 4
def page_faults():  # those that read nothing from a disk, minflt of proc(5)
    return int(Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[7])
def faults():  # of a block, in pages of it
    before = page_faults()
    for _ in range(ROUNDS):
        bytearray(BLOCK)[:] = b"x" * BLOCK
    return (page_faults() - before) / (BLOCK // mmap.PAGESIZE)
first = faults()
with keeping_freed():
    with keeping_freed():
        faults()
    before = process_memory().anonymous
    kept = faults()
print(first / ROUNDS, kept, (before - process_memory().anonymous) / BLOCK, faults() / ROUNDS)
"""


@linux
def test_freed_blocks_serve_again_while_they_are_kept_and_go_back_afterwards() -> None:
    command = [sys.executable, "-c", _FAULTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIME_LIMIT)
    before, kept, returned, after = map(float, done.stdout.split())
    assert before >= 1 and kept < 1 and returned >= 1 and after >= 1
