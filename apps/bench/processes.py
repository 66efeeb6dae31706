"""Child processes of benchmarks: watched for their memory, confined to enforced limits, or serving an engine."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import psutil

import edgeinfer
from edgeinfer.core.errors import BackendError

INTERVAL_SECONDS = 0.01
ENGINES_SCRIPT = Path(__file__).with_name("engines.py")
# Token ids inside every vocabulary that are no special tokens; time does not depend on which they are.
_FIRST_TOKEN, _TOKEN_SPAN = 3, 200
# Where control groups are mounted, by the controllers that /proc/self/cgroup names: cgroup 1, and cgroup 2.
_MOUNTS = {"memory": Path("/sys/fs/cgroup/memory"), "": Path("/sys/fs/cgroup")}
_LIMITS = ("memory.limit_in_bytes", "memory.max")
# A group whose last process has just ended is busy for a moment.
_ATTEMPTS, _PAUSE_SECONDS = 50, 0.02
# Joins the group before the program begins, so that all its pages are counted.
_JOIN = 'echo $$ > "$0" && exec "$@"'


def token_ids(count: int) -> list[int]:
    """A fixed sequence of ordinary token ids."""
    return [_FIRST_TOKEN + (index * 7) % _TOKEN_SPAN for index in range(count)]


def child_environment() -> dict[str, str]:
    """This process's environment, with edgeinfer importable from where it was imported here."""
    home = str(Path(edgeinfer.__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": home + (os.pathsep + inherited if inherited else "")}


def engine_environment(python: str | None) -> dict[str, str]:
    """The environment of an engine; another interpreter must not see the packages of this one."""
    if python is None:
        return child_environment()
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


@dataclass(frozen=True)
class Finished:
    """A child process that ended."""

    returncode: int  # negative if a signal ended it
    reason: str  # the last line of its stderr, or the signal
    stdout: str = ""
    peak_rss: int = 0  # bytes; on Linux the kernel's high-water mark, elsewhere the largest sample
    peak_anonymous: int = 0  # bytes, the largest sample; 0 where the system does not tell
    late: bool = False  # it was killed after its time limit


def watch(
    command: Sequence[str], env: Mapping[str, str] | None = None, stdin: str = "", seconds: float = math.inf
) -> Finished:
    """Run a command to its end and sample its memory, without that of its own children."""
    started, late = time.perf_counter(), False
    peak = anonymous = 0
    # Files, as a pipe that is not read until the end could fill up.
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin.encode())
        given.seek(0)
        with subprocess.Popen(command, stdin=given, stdout=out, stderr=err, env=env) as process:
            while process.poll() is None:
                peak, anonymous = map(max, zip((peak, anonymous), _memory(process.pid), strict=True))
                if time.perf_counter() - started > seconds:
                    late = True
                    process.kill()
                time.sleep(INTERVAL_SECONDS)
        stdout, lines = _text(out), _text(err).strip().splitlines()
    code = process.returncode
    silent = (signal.strsignal(-code) if code < 0 else None) or f"exit code {code}"
    reason = lines[-1].removeprefix("error: ") if lines else silent.lower()
    return Finished(code, reason, stdout, peak, anonymous, late)


def job_command(job: str, arguments: Mapping[str, Any]) -> list[str]:
    """The command line of one of `jobs.JOBS`."""
    return [sys.executable, "-m", "edgeinfer.apps.bench.jobs", job, json.dumps(arguments)]


def run_job(job: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of one of `jobs.JOBS` that runs in a process of its own."""
    ended = watch(job_command(job, arguments), child_environment())
    if ended.returncode != 0:
        raise BackendError(f"The measured process failed: {ended.reason}", "Run its command alone to see more.")
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _memory(pid: int) -> tuple[int, int]:
    """Peak resident and present anonymous bytes of a process; zeros if it has just ended."""
    if sys.platform != "linux":
        try:
            rss = psutil.Process(pid).memory_info().rss
        except psutil.NoSuchProcess:
            return 0, 0
        return rss, 0
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("Vm", "Rss"))}
    # A process that has ended but was not yet waited for has no memory left.
    return (sizes["VmHWM"], sizes["RssAnon"]) if "VmRSS" in sizes else (0, 0)


@dataclass(frozen=True)
class Enclosure:
    """A place for one child whose memory the system limits. A control group counts every page that its processes were
    the first to touch, pages of files too: at the limit pages of files are dropped, and if none are left the process is
    killed. RLIMIT_DATA counts private writable mappings, touched or not, and makes allocations fail."""

    kind: str  # "cgroup", "rlimit" or "none"
    group: Path | None = None  # the control group's folder

    def command(self, command: Sequence[str]) -> list[str]:
        """A command line that runs `command` inside."""
        if self.group is None:
            return list(command)
        return ["/bin/sh", "-c", _JOIN, str(self.group / "cgroup.procs"), *command]

    @property
    def limit(self) -> dict[str, str]:
        """The argument of `set_limit`, of JSON's types."""
        file = _limit_file(self.group) if self.group else None
        return {"kind": self.kind} | ({} if file is None else {"file": str(file)})

    def times_full(self) -> int:
        """How often the limit was reached, whether or not pages could be dropped."""
        if self.group is None:
            return 0
        plain = self.group / "memory.failcnt"
        return int(plain.read_text()) if plain.exists() else _counter(self.group / "memory.events", "max")

    def killed(self) -> bool:
        """Whether the system killed a process for its memory."""
        if self.group is None:
            return False
        return any(_counter(self.group / name, "oom_kill") for name in ("memory.oom_control", "memory.events"))


@contextlib.contextmanager
def enclosure(*, wanted: bool = True) -> Iterator[Enclosure]:
    """A control group inside this process's own where one can be made, else RLIMIT_DATA; no limits unless `wanted`."""
    group = _make_group() if wanted else None
    if group is None:
        yield Enclosure("rlimit" if wanted and sys.platform != "win32" else "none")
        return
    try:
        yield Enclosure("cgroup", group)
    finally:
        _remove(group)


def set_limit(limit: Mapping[str, str], size: int, mapped: int = 0) -> None:
    """Limit this process to `size` bytes; RLIMIT_DATA is raised by `mapped`, bytes of files mapped private."""
    if limit["kind"] == "cgroup":
        Path(limit["file"]).write_text(str(size))
    elif limit["kind"] == "rlimit":
        import resource  # absent on Windows, which never comes here

        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (size + mapped, most))


def drop_cached(paths: Iterable[Path]) -> None:
    """Drop files from the system's cache, so that the next process to read them is charged for their pages."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        with contextlib.suppress(OSError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def files_in(path: Path) -> list[Path]:
    """A file, or all files of a folder."""
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def _make_group() -> Path | None:
    for own in _own_groups():
        group = own / f"edgeinfer-bench-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        limit = _limit_file(group)
        if limit is not None and os.access(limit, os.W_OK) and os.access(group / "cgroup.procs", os.W_OK):
            return group
        _remove(group)
    return None


def _own_groups() -> Iterator[Path]:
    """This process's groups; children are put below them, so that limits already in force stay so."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in _MOUNTS:
            yield _MOUNTS[controllers] / path.lstrip("/")


def _remove(group: Path) -> None:
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(OSError):
            group.rmdir()
        if not group.exists():
            return
        time.sleep(_PAUSE_SECONDS)


def _limit_file(group: Path) -> Path | None:
    return next((group / name for name in _LIMITS if (group / name).exists()), None)


def _counter(file: Path, name: str) -> int:
    """The number of a line "name number"; 0 if there is none."""
    lines = file.read_text().splitlines() if file.exists() else ()
    return next((int(value) for key, _, value in (line.partition(" ") for line in lines) if key == name), 0)


class Worker:
    """One engine of `engines.ENGINES` in its own process, suspended except while it answers.

    Suspending matters with several threads: pools of idle engines spin for a while and would take the cores. `load_ms`
    lasts from the start of the process until the engine was ready.
    """

    def __init__(self, engine: str, options: Mapping[str, Any], python: str | None = None) -> None:
        self._engine, self._suspended = engine, False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the worker)
        started = time.perf_counter()
        command, pipe = [python or sys.executable, str(ENGINES_SCRIPT)], subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=self._log, env=engine_environment(python), text=True
            )
        except OSError as error:
            self._log.close()
            raise BackendError(f"Cannot run {python}: {error.strerror}.", "Give a Python interpreter.") from error
        try:
            self.version = str(self.ask(engine, **options)["version"])
            self.load_ms = (time.perf_counter() - started) * 1e3
        except BaseException:
            self.close()
            raise

    def ask(self, kind: str, **arguments: Any) -> Any:
        """The answer of a method of the engine."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._resume()
        try:
            self._process.stdin.write(json.dumps({"kind": kind, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        line = self._process.stdout.readline()
        if not line:
            raise self._died()
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            answer = {"error": "it does not run Python"}
        if "error" in answer:
            self._process.kill()
            raise self._died(answer["error"])
        psutil.Process(self._process.pid).suspend()
        self._suspended = True
        return answer["answer"]

    def mapped_files(self) -> list[Path]:
        """Files that the process maps now: libraries and models; none where the system does not tell."""
        maps = Path(f"/proc/{self._process.pid}/maps")
        lines = maps.read_text("utf-8", "surrogateescape").splitlines() if maps.exists() else ()
        found = dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if " /" in line)
        return [path for name in found if (path := Path(name)).is_file()]

    def peak_bytes(self) -> int:
        """Peak resident memory of the process so far."""
        return _memory(self._process.pid)[0]

    def close(self) -> None:
        """End the process."""
        self._resume()
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _resume(self) -> None:
        if self._suspended:
            psutil.Process(self._process.pid).resume()
            self._suspended = False

    def _died(self, reason: str = "") -> BackendError:
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        reason = reason or (lines[-1] if lines else f"exit code {self._process.returncode}")
        message = f"The {self._engine} worker stopped: {reason.rstrip('.')}."
        return BackendError(message, "Check that the engine is installed and its model file is whole.")
