"""The device of a model: the wanted one or an error, and for "auto" the first present one that is able."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from edgeinfer.core.errors import DeviceError, UsageError
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.runtime.devices.providers import CPU_MEMORY, STATIC_ONLY, Device, Graphs
from edgeinfer.runtime.devices.registry import choose_device, runs
from tests.cli import TIME_LIMIT
from tests.devices import STANDIN, install, lacking
from tests.tables import each_row

STATIC = Device("npu", "CPUExecutionProvider", {}, STATIC_ONLY, CPU_MEMORY)
ABSENT = Device("absent", "NoSuchExecutionProvider", {}, STANDIN.traits, CPU_MEMORY)


def chosen(graphs: Graphs = "ordinary", **options: Any) -> str:
    return choose_device(LoadOptions(**options), graphs).name


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ABSENT, STATIC, STANDIN)


@each_row(
    ("graphs", "options", "name"),
    [
        ("static", {}, "npu"),  # the first that is there and runs such graphs
        ("ordinary", {}, "standin"),
        ("none", {}, "cpu"),
        *(
            ("ordinary", lacking_one, "cpu")
            for lacking_one in ({"native": True}, {"kv": "int8"}, {"weights": "streamed"})
        ),
        ("ordinary", {"native": False, "kv": "float32", "weights": "packed"}, "standin"),
        ("ordinary", {"memory": 10**9}, "cpu"),  # budgets are kept there alone
        ("ordinary", {"memory": 10**9, "device": "standin"}, "standin"),
        ("static", {"device": "npu"}, "npu"),
        ("none", {"device": "cpu"}, "cpu"),
    ],
)
def test_auto_takes_the_first_that_is_able(graphs: Graphs, options: dict[str, Any], name: str) -> None:
    assert chosen(graphs, **options) == name


def test_graphs_that_a_device_does_not_run_are_refused() -> None:
    with pytest.raises(DeviceError, match=r"only graphs of fixed shapes.*--static"):
        chosen(device="npu")
    with pytest.raises(DeviceError, match="an engine of its own"):
        chosen("none", device="standin")
    assert not runs(STATIC, "ordinary") and runs(STATIC, "static") and not runs(STANDIN, "none")


def test_auto_looks_for_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, STANDIN, hardware=lambda device: False)
    assert chosen() == "cpu" and chosen(device="standin") == "standin"

    def broken(device: Device) -> bool:
        raise DeviceError("its library is damaged")

    install(monkeypatch, STANDIN, hardware=broken)
    assert chosen() == "cpu"
    install(monkeypatch, STANDIN, automatic=False)
    assert chosen() == "cpu"


def test_what_is_not_installed_is_refused_with_its_package() -> None:
    with pytest.raises(DeviceError, match=r"absent is not installed here\. Install absent-package in place of"):
        chosen(device="absent")


def test_engines_of_their_own_do_without_onnxruntime() -> None:
    """It takes 50 MB that they have no use for."""
    code = (
        "import sys; from edgeinfer.core.options.load import LoadOptions\n"
        "from edgeinfer.runtime.devices import registry\n"
        "for name in ('auto', 'cpu'): registry.choose_device(LoadOptions(device=name), 'none')\n"
        "print('onnxruntime' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=TIME_LIMIT)
    assert done.stdout.strip() == "False"


@each_row(
    ("options", "lacks"),
    [({"native": True}, "native kernel"), ({"kv": "int4"}, "cache of int4"), ({"weights": "mapped"}, "are mapped")],
)
def test_what_a_device_lacks_cannot_be_asked_of_it(options: dict[str, Any], lacks: str) -> None:
    with pytest.raises(UsageError, match=lacks):
        chosen(device="standin", **options)
    assert chosen("static", device="npu", **options) == "npu"


def test_what_a_device_has_can(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, lacking(quantized_kv=True))
    assert chosen(kv="int8") == "standin"
