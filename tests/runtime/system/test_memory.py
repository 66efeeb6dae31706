"""Memory of the process: pages of files released, its own measure, and what the system refuses it."""

from __future__ import annotations

import mmap
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.core.errors import BudgetError, UsageError
from edgeinfer.runtime.system.memory import (
    MappedFile,
    allocating,
    is_refusal,
    process_memory,
    release_code,
    release_freed,
    require_room,
    return_large_frees,
)
from tests.tables import each_row
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


_UNHEARD_OF = 1 << 60  # bytes

# A script that refuses what it allocates beyond what it has at the time.
_LIMITED = """
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
import edgeinfer
from edgeinfer.core.errors import EdgeInferError

def limit(more):
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    has = int(fields["VmData"].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (has + more, resource.RLIM_INFINITY))

def unlimited():
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)

def load(**options):
    return edgeinfer.load(context=1024, remember=False, native=NATIVE, **options)

def outcome(work):
    try:
        return work()
    except EdgeInferError as error:
        return type(error).__name__ + ": " + error.message

def under_each(limits, work):
    # Each from the same state, in a process of its own: what one leaves would be room for the next.
    for more in limits:
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            signal.alarm(SECONDS)
            code = 1
            try:
                limit(more)
                work()
                sys.stdout.flush()
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        assert os.waitpid(process, 0)[1] == 0, more
"""


def run(script: str, native: bool | None = None) -> list[str]:
    """The lines that a script prints, which no refusal may end."""
    code = _LIMITED.replace("NATIVE", str(native)).replace("SECONDS", str(int(TIME_LIMIT / 2))) + script
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIME_LIMIT)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_numpy_tells_how_many_bytes() -> None:
    said = r"^The table needs 1152921504\.6 GB that the system does not grant"
    with pytest.raises(BudgetError, match=said) as caught, allocating("The table"):
        np.empty(_UNHEARD_OF, np.uint8)
    assert "context" in caught.value.hint


@each_row(
    ("text", "said"),
    [
        ("Exception during initialization: std::bad_alloc", "memory"),
        ("Failed to allocate memory for requested buffer of size 5000000", "5.0 MB"),
        ("LinearLowBit: out of memory for 64 rows", "memory"),
    ],
)
def test_texts_of_native_code(text: str, said: str) -> None:
    with pytest.raises(BudgetError, match=f"^The pass needs {said} that"), allocating("The pass"):
        raise RuntimeError(text)


def test_other_errors_pass() -> None:
    for error in (ValueError("bad"), StopIteration(), KeyboardInterrupt(), UsageError("out of memory of old")):
        with pytest.raises(type(error)) as caught, allocating("Nothing"):
            raise error
        assert caught.value is error
    assert not is_refusal(ValueError("no such layer"))


def test_an_iterator_may_end_inside() -> None:
    def ends() -> Iterator[int]:
        yield 1

    items = ends()

    @allocating("An item")
    def item() -> int:
        return next(items)

    assert item() == 1
    with pytest.raises(StopIteration):
        item()


def test_room_is_asked_for() -> None:
    require_room("A little", 1 << 20)
    require_room("Nothing", 0)
    with pytest.raises(BudgetError, match="Much needs"):
        require_room("Much", _UNHEARD_OF)


@linux
@pytest.mark.parametrize("native", [None, pytest.param(False, marks=pytest.mark.slow)])
def test_a_load_that_is_refused(native: bool | None) -> None:
    # Everything is imported by then.
    script = """
edgeinfer.plan()
import edgeinfer.runtime.backends.onnx.backend

def work():
    print(outcome(lambda: load(threads=2)))
    unlimited()
    print(load(threads=2).generate("Once upon", max_tokens=3).usage.completion_tokens)

under_each((0, 5_000_000, 10_000_000, 14_000_000), work)
"""
    lines = run(script, native)
    assert len(lines) == 8
    for first, second in zip(lines[::2], lines[1::2], strict=True):
        assert first.startswith("BudgetError: ") and "that the system does not grant" in first
        assert second == "3"


@linux
@pytest.mark.parametrize("speculation", ["off", pytest.param("auto", marks=pytest.mark.slow)])
def test_a_model_goes_on_after_a_reply_that_is_refused(speculation: str) -> None:
    # One thread, for others are lost where a process is copied.
    script = f"""
options = {{"max_tokens": 12, "speculation": {speculation!r}}}
short, long = [5] * 200, [7] * 950
model = load(threads=1)
before = model.generate(short, **options).token_ids
reference = model.generate(long, **options).token_ids
model.close()
model = load(threads=1)
model.generate(short, **options)

def work():
    print(outcome(lambda: model.generate(long, **options)))
    print(outcome(lambda: model.generate(short, **options).token_ids) == before)
    print(outcome(lambda: model.generate(long, **options)))
    unlimited()
    print(model.generate(long, **options).token_ids == reference)
    print(model.generate(short, **options).token_ids == before)

under_each((50_000, 300_000, 1_000_000, 2_000_000), work)
"""
    lines = run(script)
    assert len(lines) == 20
    for refused, _, again, long_after, short_after in zip(*(lines[n::5] for n in range(5)), strict=True):
        assert refused.startswith("BudgetError: ") and again.startswith("BudgetError: ")
        assert (long_after, short_after) == ("True", "True")


@linux
def test_a_shorter_prompt_works_where_a_long_one_was_refused() -> None:
    script = """
model = load(threads=2)
before = model.generate([5] * 200, max_tokens=12).token_ids
limit(2_500_000)
print(outcome(lambda: model.generate([7] * 950, max_tokens=12)))
print(outcome(lambda: model.generate([5] * 200, max_tokens=12).token_ids) == before)
"""
    refused, short = run(script)
    assert refused.startswith("BudgetError: ")
    assert short == "True"
