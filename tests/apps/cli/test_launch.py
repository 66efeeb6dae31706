"""`edgeinfer launch`: settings of agents, printed and written, and an agent that finds the server it was given."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.apps.cli import launch
from edgeinfer.apps.cli.main import main
from edgeinfer.core.errors import StorageError
from tests.speculation import needs_builtin
from tests.tables import each_row

AGENT = """#!{python}
import json, os, sys, urllib.request
with urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/models") as answer:
    served = [model["id"] for model in json.load(answer)["data"]]
with open(os.environ["SAID"], "w") as file:
    json.dump({{"args": sys.argv[1:], "served": served, "key": os.environ["OPENAI_API_KEY"]}}, file)
sys.exit(7)
"""


@each_row("agent", launch._agents())
def test_settings_name_the_server_the_model_and_the_sizes(agent: str) -> None:
    served = launch._Served("http://127.0.0.1:1", "toy/model", 32768)
    filled = launch._filled(launch._agents()[agent], served)
    text = json.dumps(filled)
    assert "http://127.0.0.1:1" in text and "toy/model" in text and "{model}" not in text and "{url}" not in text
    assert all(isinstance(value, str) for value in launch._texts(filled["env"]).values())


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home and a path of commands of the test's own, and no server."""
    for name in ("HOME", "XDG_DATA_HOME", "PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("EDGEINFER_API_KEY", raising=False)
    return tmp_path


def test_printing_starts_nothing(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "codex", "-m", "toy", "--port", "9", "--print", "--", "--full-auto"]) == 0
    out = capsys.readouterr().out
    assert "export EDGEINFER_API_KEY=local" in out and "http://127.0.0.1:9/v1" in out and out.endswith("--full-auto\n")
    assert main(["launch", "pi", "-m", "toy", "--port", "9", "--print"]) == 0
    assert "# ~/.pi/agent/models.json" in capsys.readouterr().out
    assert list(alone.iterdir()) == []


def test_agents_are_listed_and_missing_ones_named(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch"]) == 0
    assert capsys.readouterr().out.count("not found") == len(launch._agents())
    assert main(["launch", "aider", "--port", "9"]) == 2
    assert "aider is not installed" in capsys.readouterr().err
    assert main(["launch", "adier"]) == 2
    assert "Did you mean aider?" in capsys.readouterr().err


def test_settings_are_added_to_a_file_which_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "agent" / "models.json"
    launch._merge(path, {"providers": {"edgeinfer": {"models": [1]}}})
    path.write_text(json.dumps({"theme": "dark", "providers": {"mine": {}, "edgeinfer": {"models": [1]}}}))
    launch._merge(path, {"providers": {"edgeinfer": {"models": [2]}}})
    made = {"theme": "dark", "providers": {"mine": {}, "edgeinfer": {"models": [2]}}}
    assert json.loads(path.read_text()) == made
    assert json.loads((path.parent / "models.json.before-edgeinfer").read_text())["providers"]["edgeinfer"][
        "models"
    ] == [1]
    path.write_text("// mine")
    with pytest.raises(StorageError, match="cannot be changed"):
        launch._merge(path, made)
    assert path.read_text() == "// mine"


@needs_builtin
@pytest.mark.skipif(sys.platform == "win32", reason="the agent of this test is a script with a first line for Unix")
def test_an_agent_gets_a_server_that_ends_with_it(
    alone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = alone / "gptme"
    agent.write_text(AGENT.format(python=sys.executable))
    agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", os.pathsep.join([str(alone), os.defpath]))
    monkeypatch.setenv("SAID", str(alone / "said"))
    monkeypatch.chdir(Path(launch.__file__).resolve().parents[2])
    started: list[Any] = []
    begin = subprocess.Popen

    def note(*args: Any, **options: Any) -> Any:
        started.append(begin(*args, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", note)
    assert main(["launch", "gptme", "--port", "0", "--", "hello"]) == 7
    said = json.loads((alone / "said").read_text())
    assert said["args"] == ["--model", "local/tales", "hello"] and "tales" in said["served"] and said["key"] == "local"
    assert started[0].poll() is not None
    assert "The context is 1,024 tokens" in capsys.readouterr().err
