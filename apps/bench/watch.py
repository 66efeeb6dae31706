"""Memory of processes, seen from outside so as to add none."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from edgeinfer.errors import BackendError

INTERVAL_SECONDS = 0.01


@dataclass(frozen=True)
class Watched:
    """What a finished child printed and used.

    Attributes:
        stdout: all of it.
        seconds: from start to end.
        peak_rss_bytes: most resident memory; on Linux the kernel's own high-water mark, elsewhere the largest sample.
        anonymous_bytes, file_bytes: split of the largest sample; 0 where the system does not tell.
        peak_anonymous_bytes: most anonymous memory of any sample.
    """

    stdout: str
    seconds: float
    peak_rss_bytes: int
    anonymous_bytes: int
    file_bytes: int
    peak_anonymous_bytes: int


@dataclass(frozen=True)
class Ended:
    """How a watched child ended.

    Attributes:
        returncode: as subprocess has it: negative where a signal ended it.
        reason: the last line of its stderr, or what ended it.
        watched: None where it ended before it could be measured.
        late: it was ended because its time was over.
    """

    returncode: int
    reason: str
    watched: Watched | None
    late: bool = False


@dataclass(frozen=True)
class _Sample:
    rss: int
    peak: int
    anonymous: int
    file: int


def run_watched(command: Sequence[str], env: Mapping[str, str] | None = None) -> Watched:
    """Runs a command to its end and watches its memory; children of the command are not counted."""
    ended = watch(command, env)
    if ended.returncode != 0:
        raise BackendError(f"The measured process failed: {ended.reason}", "Run its command alone to see more.")
    if ended.watched is None:
        raise BackendError("The measured process ended before it could be measured.", "Measure something longer.")
    return ended.watched


def watch(
    command: Sequence[str], env: Mapping[str, str] | None = None, stdin: str = "", seconds: float = math.inf
) -> Ended:
    """Runs a command to its end, whatever that is, and watches its memory; its own children are not counted."""
    started = time.perf_counter()
    samples, late = [], False
    # Files, as a pipe that is not read until the end could fill up.
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin.encode())
        given.seek(0)
        with subprocess.Popen(command, stdin=given, stdout=out, stderr=err, env=env) as process:
            while process.poll() is None:
                sample = _sample(process.pid)
                if sample:
                    samples.append(sample)
                if time.perf_counter() - started > seconds:
                    late = True
                    process.kill()
                time.sleep(INTERVAL_SECONDS)
        taken = time.perf_counter() - started
        stdout, stderr = _text(out), _text(err)
    lines = stderr.strip().splitlines() or [_ending(process.returncode)]
    watched = _watched(samples, stdout, taken) if samples else None
    return Ended(process.returncode, lines[-1].removeprefix("error: "), watched, late)


def _ending(returncode: int) -> str:
    """How a process ended that said nothing."""
    name = signal.strsignal(-returncode) if returncode < 0 else None
    return name.lower() if name else f"exit code {returncode}"


def _watched(samples: Sequence[_Sample], stdout: str, seconds: float) -> Watched:
    largest = max(samples, key=lambda sample: sample.rss)
    return Watched(
        stdout=stdout,
        seconds=seconds,
        peak_rss_bytes=max(sample.peak for sample in samples),
        anonymous_bytes=largest.anonymous,
        file_bytes=largest.file,
        peak_anonymous_bytes=max(sample.anonymous for sample in samples),
    )


def peak_bytes(pid: int) -> int:
    """The most the process had resident; 0 where it has ended. Only Linux remembers that: elsewhere it is what it has
    now."""
    sample = _sample(pid)
    return sample.peak if sample else 0


class Growth:
    """The most that this process takes beyond what it has now, pages of files aside.

    Attributes:
        peak_before: bytes that it had resident at most until now, which the system forgets.
    """

    def __init__(self) -> None:
        before = _own_sample()
        self.peak_before = before.peak
        self._rss, self._file = before.rss, before.file
        if sys.platform == "linux":
            # Lets VmHWM begin again (proc(5)).
            Path("/proc/self/clear_refs").write_text("5", "utf-8")

    def bytes(self) -> int:
        """What that is so far; pages of files that are there now are taken to have been there at the peak."""
        now = _own_sample()
        return max(0, now.peak - self._rss - (now.file - self._file))


def mapped_files(pid: int) -> tuple[Path, ...]:
    """Every file that the process maps now; none where the system does not tell."""
    maps = Path(f"/proc/{pid}/maps")
    if not maps.exists():
        return ()
    lines = maps.read_text("utf-8", "surrogateescape").splitlines()
    named = (line.split(maxsplit=5)[5] for line in lines if " /" in line)
    return tuple(path for name in dict.fromkeys(named) if (path := Path(name)).is_file())


def resident_bytes(path: Path) -> int:
    """Bytes of a file that this process has in memory; 0 where it maps none, or the system does not say."""
    if sys.platform != "linux":
        return 0
    return sum(mapped.rss for mapped in psutil.Process().memory_maps() if mapped.path == str(path.resolve()))


def _own_sample() -> _Sample:
    sample = _sample(os.getpid())
    assert sample is not None, "this process runs"
    return sample


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _sample(pid: int) -> _Sample | None:
    """The process's memory now, or None if it has just ended."""
    if sys.platform != "linux":
        try:
            rss = psutil.Process(pid).memory_info().rss
        except psutil.NoSuchProcess:
            return None
        return _Sample(rss, rss, 0, 0)
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("Vm", "Rss"))}
    # A process that has ended but was not yet waited for has no memory left.
    if "VmRSS" not in sizes:
        return None
    return _Sample(sizes["VmRSS"], sizes["VmHWM"], sizes["RssAnon"], sizes["RssFile"] + sizes["RssShmem"])
