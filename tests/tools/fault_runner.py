"""Run tests against faults in one pytest process, with a child for each fault in which functions get the faulty code.

A plugin that tests.tools.faults gives to pytest, in a copy of the checkout. Starting and collecting is done once; a
fault costs no more than its tests do. The file is changed as well, for processes that tests start.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

import pytest

# Seconds without the end of a test, of which each has a limit of its own; a fault that makes one hang has been found.
PATIENCE = 400
CRASHED = "(the process)"
UNCHANGED = "(no fault put in)"


@dataclass(frozen=True)
class Job:
    """A fault with its number, the faulty text of its file, and the tests of its line by tier, in order."""

    number: int
    file: str
    text: str
    fast: list[str]
    rest: list[str]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", type=Path, help="faults as JSON, with their tests")
    parser.addoption("--faults-to", type=int, help="descriptor to which results are written")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("faults"):
        config.pluginmanager.register(Runner(config.getoption("faults_to")))


class Runner:
    """Takes the place of pytest's loop over tests."""

    def __init__(self, results: int) -> None:
        self.results = results
        self.failed = False
        self.items: dict[str, pytest.Item] = {}
        self.written = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        for made in json.loads(session.config.getoption("faults").read_text("utf-8")):
            job = Job(**made)
            test = self.found_by(job, job.fast)
            tier = "fast" if test else "full"
            test = test or self.found_by(job, job.rest)
            line = json.dumps({"number": job.number, "tier": tier if test else "", "test": test or ""})
            os.write(self.results, f"{line}\n".encode())
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    def found_by(self, job: Job, tests: Sequence[str]) -> str | None:
        """The first of these tests that fails with a fault and passes without."""
        path, left = Path(job.file), [test for test in tests if test in self.items]
        original = path.read_text("utf-8")
        while left:
            self._write(path, job.text)
            try:
                failed = self._first_failure(left, (path, original, job.text))
            finally:
                self._write(path, original)
            if failed is None or failed == CRASHED or self._first_failure([failed], None) is None:
                return failed
            left.remove(failed)
        return None

    def _write(self, path: Path, text: str) -> None:
        """Write a source with a modification time that no byte code of another text has."""
        path.write_text(text, "utf-8")
        self.written += 1
        moment = path.stat().st_mtime + self.written
        os.utime(path, (moment, moment))

    def _first_failure(self, tests: Sequence[str], change: tuple[Path, str, str] | None) -> str | None:
        """The first of these tests that fails in a child, or CRASHED if the child ends without naming one."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.setsid()
            os.close(reader)
            try:
                self._run(tests, change, writer)
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as told:
            last = CRASHED
            while select.select([told], [], [], PATIENCE)[0] and (line := told.readline()):
                last = line.strip()
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # with all that its tests have left
        os.waitpid(child, 0)
        if last.startswith(UNCHANGED):
            raise RuntimeError(last)
        return None if last == "(passed)" else last if last in self.items else CRASHED

    def _run(self, tests: Sequence[str], change: tuple[Path, str, str] | None, writer: int) -> None:
        if change:
            try:
                replace_code(*change)
            except Exception as error:
                os.write(writer, f"{UNCHANGED} {error!r}\n".encode())
                return
        chosen = [self.items[test] for test in tests]
        for item, following in zip(chosen, [*chosen[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                os.write(writer, f"{item.nodeid}\n".encode())
                return
            os.write(writer, b"(running)\n")
        os.write(writer, b"(passed)\n")


def replace_code(path: Path, old: str, new: str) -> None:
    """Replace the code of all functions of a file by that of its new text, in which they begin on the same lines."""
    place = path.resolve()
    before, after = (list(codes(compile(text, str(place), "exec", dont_inherit=True))) for text in (old, new))
    changed = {known_by(code): faulty for code, faulty in zip(before, after, strict=True)}
    gc.unfreeze()
    # No isinstance: some objects answer it with a warning.
    for function in [found for found in gc.get_objects() if type(found) is FunctionType]:
        faulty = changed.get(known_by(function.__code__))
        if faulty and Path(function.__code__.co_filename).resolve() == place:
            function.__code__ = faulty


def codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and the code objects inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def known_by(code: CodeType) -> tuple[object, ...]:
    """The identity of a function within its file."""
    return code.co_qualname, code.co_firstlineno, code.co_linetable
