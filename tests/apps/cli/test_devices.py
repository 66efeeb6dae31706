"""`edgeinfer devices`, and --device of the commands that load a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeinfer.apps.cli.main import main
from edgeinfer.core.options.load import DEVICES
from edgeinfer.runtime.devices.providers import is_installed
from edgeinfer.runtime.devices.registry import ENTRIES, find_device
from tests import cli
from tests.devices import STANDIN, install
from tests.tables import each_row

LOADING = ("run", "chat", "serve", "tune", "plan", "bench spec", "bench speed", "bench curve")


def test_the_table_lists_every_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--no-check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines[1:]]
    assert names == [device.name for entry in ENTRIES for device in entry.devices]
    assert "native kernel" in lines[-1]
    for line, name in zip(lines[1:], names, strict=True):
        if not is_installed(find_device(name)[1]):
            assert f"needs {find_device(name)[0].package}" in line


def test_json_holds_the_same_and_what_was_tried() -> None:
    done = cli.edgeinfer("devices", "--json")
    assert done.returncode == 0, done.stderr
    devices = {device["name"]: device for device in json.loads(done.stdout)["devices"]}
    assert set(devices) <= set(DEVICES)
    assert devices["cpu"]["check"] == "ok" and devices["cpu"]["bundles"] == "all"
    assert devices["openvino:NPU"]["bundles"] == "static"
    assert set(devices["cpu"]["traits"]) == {"in_place_kv", "quantized_kv", "branches", "tree_bias", "custom_ops"}
    for device in devices.values():
        assert device["check"] or not (device["installed"] and device["hardware"])


@each_row("command", LOADING)
def test_commands_that_load_a_model_take_a_device(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help-all"]) == 0
    assert "--device NAME" in capsys.readouterr().out


@each_row("command", [["run", "-p", "Once"], ["plan"], ["eval", "ppl", "--text", __file__]])
def test_unknown_devices_are_bad_usage(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--device", "npu"]) == 2
    refusal = capsys.readouterr().err
    assert "There is no device 'npu'." in refusal and "Choose auto or one of cpu, " in refusal


@pytest.mark.parametrize("command", [["run", "-p", "Once"], ["plan"]])
def test_a_device_that_is_not_installed_ends_with_the_package(
    command: list[str], small_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry, device = find_device("directml")
    if is_installed(device):
        pytest.skip("it is installed")
    assert main([*command, "-m", str(small_bundle), "--device", "directml"]) == 5
    assert f"Install {entry.package} in place of onnxruntime" in capsys.readouterr().err


@pytest.mark.usefixtures("told_costs")
def test_results_and_plans_say_where_it_ran(
    small_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, STANDIN)
    command = ["run", "-m", str(small_bundle), "-p", "Once", "-n", "2", "-t", "1", "--json", "--device"]
    for device in ("standin", "cpu"):
        assert main([*command, device]) == 0
        assert json.loads(capsys.readouterr().out)["model"]["device"] == device
    assert main([*command, "standin"]) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert (model["device"], model["device_note"], model["kernel"]) == ("standin", "", "MatMulNBits")
    assert main(["plan", "-m", str(small_bundle), "--device", "standin"]) == 0
    assert "standin" in capsys.readouterr().out
    assert main(["plan", "-m", str(small_bundle), "--json", "--device", "standin"]) == 0
    assert json.loads(capsys.readouterr().out)["device"]["name"] == "standin"
