"""The unit file and the compose file of docs/examples start a server as the command takes it."""

from __future__ import annotations

import configparser
import shlex
from pathlib import Path

import pytest

from edgeinfer.apps.cli.main import build_parser

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


def check(words: list[str]) -> None:
    """The words of a command that starts a server for others, with keys."""
    assert words[0].rpartition("/")[2] == "edgeinfer"
    given = build_parser("serve").parse_args(words[1:])
    assert (given.host, given.port, given.model) == ("0.0.0.0", 8080, "qwen3-4b")
    assert given.api_key_file is not None and given.memory


def test_the_unit_file_starts_a_server() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # names of settings have large letters
    unit.read_string((EXAMPLES / "edgeinfer.service").read_text("utf-8"))
    assert unit.sections() == ["Unit", "Service", "Install"]
    check(shlex.split(unit["Service"]["ExecStart"]))
    assert unit["Service"]["LoadCredential"].partition(":")[0] in unit["Service"]["ExecStart"].rpartition("/")[2]


def test_the_compose_file_starts_a_server() -> None:
    yaml = pytest.importorskip("yaml")
    told = yaml.safe_load((EXAMPLES / "compose.yaml").read_text("utf-8"))
    service = told["services"]["edgeinfer"]
    check(service["command"])
    assert service["secrets"] == list(told["secrets"]) and "8080:8080" in service["ports"]
