"""Does what a page says, block by block, as someone does who reads it from top to bottom at a prompt."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path

import pytest

import edgeinfer
from tests.cli import TIME_LIMIT, Child, command, environment, interruptible_environment
from tests.cli import edgeinfer as run_here
from tests.docs.commands import INSTEAD, NOT_RUN, Rule
from tests.docs.pages import ROOT, Block
from tests.hub_server import hub_environment

SHELL = ("sh", "console")
# What only a shell understands.
_SHELL_SIGNS = re.compile(r"[|<>$;`]")
# Reads blocks of Python as lines of JSON and runs each; what they print goes back as another line.
_SESSION = """
import contextlib, io, json, sys, traceback
names = {"__name__": "__main__"}
for line in sys.stdin:
    place, code = json.loads(line)
    out, said = io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(code, place, "exec"), names)
    except BaseException:
        said = traceback.format_exc()
    print(json.dumps([out.getvalue(), said]), flush=True)
"""
_ONLINE = {"HF_HUB_OFFLINE": "0"}
_ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")


class Reader:
    """Someone in a folder, the process's current one and empty but for what a page presumes, with the address of what
    they take for the Hugging Face hub."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, hub: str) -> None:
        self.used: set[Rule] = set()  # the rules of `tests.docs.commands` that were needed
        self._folder = folder
        self._session: Child | None = None
        self._running = contextlib.ExitStack()
        self._served: dict[str, str] = {}
        scripts = folder.parent / "scripts"
        scripts.mkdir()
        for name, line in (("edgeinfer", shlex.join(command())), ("python", sys.executable)):
            (scripts / name).write_text(f'#!/bin/sh\nexec {line} "$@"\n')
            (scripts / name).chmod(0o755)
        patch.chdir(folder)
        patch.setenv("PATH", f"{scripts}{os.pathsep}{os.environ['PATH']}")
        for variable, value in hub_environment(hub, folder.parent).items():
            patch.setenv(variable, value)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def follow(self, block: Block) -> None:
        """Runs the lines of a block.

        Raises:
            AssertionError: one of them fails.
        """
        text = self._adapted(block.text)
        if block.language == "python":
            self._python(text, str(block))
        elif block.language in SHELL:
            for line in text.replace("\\\n", " ").splitlines():
                for part in line.split(" && "):
                    self.command(part.strip().removeprefix("$ ").removeprefix(".venv/bin/"), str(block))
        elif block.language == "json":
            json.loads(block.text)
        else:
            assert block.language in ("text", "{eval-rst}", "{toctree}", "{include} ../CONTRIBUTING.md"), str(block)

    def _adapted(self, text: str) -> str:
        for rule in INSTEAD:
            if rule.pattern in text:
                self.used.add(rule)
                text = text.replace(rule.pattern, rule.instead)
        for told, real in self._served.items():
            text = text.replace(told, real)
        return text

    def _python(self, code: str, place: str) -> None:
        """Runs a block in the page's own interpreter, in which names of earlier blocks are known."""
        if self._session is None:
            self._session = self._start([sys.executable, "-c", _SESSION])
        assert self._session.stdin is not None and self._session.stdout is not None
        self._session.stdin.write(json.dumps([place, code]).encode() + b"\n")
        self._session.stdin.flush()
        out, error = json.loads(self._session.stdout.readline())
        assert error == "", f"{place}: {error}"
        assert out.strip() or "print" not in code, f"{place} prints nothing"

    def command(self, line: str, place: str) -> None:
        """Runs a line."""
        words = shlex.split(line, comments=True)
        if not words:
            return
        for rule in NOT_RUN:
            if line.startswith(rule.pattern):
                self.used.add(rule)
                if words[0] == "edgeinfer":
                    parses(words[1:], place)
                return
        if words[:2] == ["pip", "install"]:
            installs(words[2:], place)
        elif words[:2] == ["edgeinfer", "serve"]:
            self._serve(words[1:], place)
        elif words[:2] == ["edgeinfer", "chat"] and "--terminal" not in words and not _SHELL_SIGNS.search(line):
            self._open_app(words[1:])
        elif words[0] == "edgeinfer" and not needs_process(line, words):
            done = run_here(*words[1:])
            assert done.returncode == 0, f"{place}: {line}\n{done.stderr.decode()}"
        else:
            run = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", line],
                env=environment() | _ONLINE,
                capture_output=True,
                check=False,
                timeout=TIME_LIMIT,
            )
            assert run.returncode == 0, f"{place}: {line}\n{run.stderr.decode()}"

    def _serve(self, words: list[str], place: str) -> None:
        """Starts the server on a free port, which later blocks find where they look for the one of the page."""
        at = words.index("--port") + 1 if "--port" in words else None
        told = f"http://127.0.0.1:{8080 if at is None else words[at]}"
        child = self._start(command(*words[:at], "0", *words[at + 1 :]) if at else command(*words, "--port", "0"))
        assert child.stdout is not None
        line = child.stdout.readline().decode()
        found = _ADDRESS.search(line.replace("0.0.0.0", "127.0.0.1"))
        assert found, f"{place}: {line}"
        self._served[told] = found[0]

    def _open_app(self, words: list[str]) -> None:
        """Opens the chat app without its window, and looks at the page."""
        child = self._start(command(*words, "--no-window"))
        assert child.stdout is not None
        address = child.stdout.readline().decode().split()[-1]
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor())
        with opener.open(address, timeout=TIME_LIMIT) as page:
            assert "<title>edgeinfer" in page.read().decode()

    def _start(self, line: list[str]) -> Child:
        child = self._running.enter_context(Child(line, interruptible_environment() | _ONLINE, stdin=subprocess.PIPE))
        self._running.callback(child.kill)
        return child


def needs_process(line: str, words: list[str]) -> bool:
    """Whether a command cannot be run in the process of the tests: a shell has to read it, its budget counts the whole
    process, or it asks the hub, of which this process knows the usual address."""
    names = {model.name for model in edgeinfer.catalog()}
    of_hub = any(word in names or (word.count("/") == 1 and not Path(word).exists()) for word in words)
    return "--memory" in words or of_hub or _SHELL_SIGNS.search(line) is not None


def installs(words: list[str], place: str) -> None:
    """Checks that an installation names extras that there are, with the checkout."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for word in words:
        if not word.startswith("-"):
            name, _, asked = word.rstrip("]").partition("[")
            assert name in (".", "edgeinfer"), f"{place}: {word}"
            assert set(asked.split(",")) - {""} <= set(extras), f"{place}: {word}"


def parses(words: list[str], place: str) -> None:
    """Checks that a command that is not run has no options but those that there are."""
    from edgeinfer.apps.cli.main import build_parser
    from edgeinfer.core.errors import UsageError

    try:
        build_parser(words[0]).parse_args(words)
    except UsageError as error:
        raise AssertionError(f"{place}: {error}") from error
