"""Loading models on devices: what runs where, what is said where it cannot, what is kept apart."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import edgeinfer
from edgeinfer.core.errors import BackendError, DeviceError, UsageError
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.core.results import ModelInfo
from edgeinfer.loading import open_model, profiles_of
from edgeinfer.runtime.backends.onnx.backend import OnnxBackend
from tests.devices import STANDIN, install, lacking
from tests.tables import each_row

OPTIONS: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
PROMPT = "Tell me about the little dog and the cat"
BROKEN = dataclasses.replace(STANDIN, name="broken", memory="cuda")


pytestmark = pytest.mark.usefixtures("told_costs")


@pytest.fixture(autouse=True)
def standin(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, STANDIN)


@pytest.fixture(scope="module")
def expected(small_bundle: Path) -> str:
    """The text of onnxruntime's own operators."""
    options: dict[str, Any] = {"device": "cpu", "native": False, "exact": False, "speculation": "off"}
    with edgeinfer.load(small_bundle, threads=1, **options) as model:
        return model.generate(PROMPT, **OPTIONS).text


@each_row("device", ["auto", "standin"])
def test_a_model_runs_on_a_device_with_the_text_of_its_operators(
    small_bundle: Path, expected: str, device: str
) -> None:
    with edgeinfer.load(small_bundle, threads=1, device=device) as model:
        assert (model.info.device, model.info.device_note) == ("standin", "")
        assert model.plan.device == "standin" and model.plan.layout == "portable"
        assert model.plan.to_dict()["device"] == {"name": "standin", "note": "", "terms": {}}
        result = model.generate(PROMPT, **OPTIONS)
        assert result.text == expected
        chat = model.chat()
        chat.send("Who?", max_tokens=4)
        model.unload()
        assert model.generate(PROMPT, **OPTIONS).text == expected
        assert model.info.device == "standin"


def test_drafts_change_nothing_there(small_bundle: Path, expected: str) -> None:
    with edgeinfer.load(small_bundle, threads=1, device="standin") as model:
        for _ in range(2):
            assert model.generate(PROMPT, speculation="copy,ngram,recycle", **OPTIONS).text == expected
        with pytest.raises(UsageError, match=r"cannot verify trees\. Draft chains"):
            model.generate(PROMPT, draft_width=2, **OPTIONS)


def test_a_device_that_cannot_update_in_place_serves_too(
    small_bundle: Path, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, lacking(in_place_kv=False))
    with edgeinfer.load(small_bundle, threads=1, device="standin") as model:
        assert model.generate(PROMPT, **OPTIONS).text == expected


def check_fell_back(info: ModelInfo, reason: str, log: str) -> None:
    assert info.device == "cpu" and reason in info.device_note
    assert reason in log and "The CPU runs small." in log


@each_row("device", ["auto", "broken"])
def test_a_device_that_fails_leaves_the_model_to_the_cpu(
    small_bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: str
) -> None:
    install(monkeypatch, BROKEN)
    with (
        caplog.at_level(logging.WARNING, "edgeinfer"),
        edgeinfer.load(small_bundle, threads=1, device=device) as model,
    ):
        check_fell_back(model.info, "The device broken (CPUExecutionProvider) fails", caplog.text)
        assert model.plan.device == "cpu" and model.plan.device_note == model.info.device_note
        assert model.generate(PROMPT, **OPTIONS).text
        model.unload()
        model.generate(PROMPT, **OPTIONS)
        assert model.info.device_note == model.plan.device_note, "what was said once stays known"
        assert caplog.text.count("The CPU runs") == 1, "a device that failed is not tried again"


def test_a_device_without_room_leaves_the_model_to_the_cpu(
    small_bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, BROKEN)

    def full(*args: object) -> object:
        raise RuntimeError("Failed to allocate memory for requested buffer of size 4096")

    monkeypatch.setattr(ort.OrtValue, "ortvalue_from_shape_and_type", full)
    with edgeinfer.load(small_bundle, threads=1, device="broken") as model:
        check_fell_back(model.info, "it has no room for", caplog.text)


@each_row("wrong", ["NaN", "failure"])
def test_a_first_pass_that_fails_leaves_the_model_to_the_cpu(
    small_bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    forward = OnnxBackend.forward

    def spoilt(self: OnnxBackend, *args: Any, **options: Any) -> Any:
        out = forward(self, *args, **options)
        if not self._device.on_cpu:
            if wrong == "failure":
                raise BackendError("it does not work")
            out[0].logits[:] = np.nan
        return out

    monkeypatch.setattr(OnnxBackend, "forward", spoilt)
    with edgeinfer.load(small_bundle, threads=1, device="standin") as model:
        check_fell_back(model.info, "no numbers" if wrong == "NaN" else "it does not work", caplog.text)
        assert model.info.kernel != "MatMulNBits" or model.plan.layout == "portable"


def test_what_cannot_be_is_an_error_and_no_fall_back(small_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, lacking(dynamic_shapes=False), dataclasses.replace(STANDIN, name="gone", provider="None"))
    with pytest.raises(DeviceError, match="--static"):
        edgeinfer.load(small_bundle, device="standin")
    with pytest.raises(DeviceError, match="Install gone-package"):
        edgeinfer.load(small_bundle, device="gone")
    with edgeinfer.load(small_bundle, threads=1) as model:
        assert (model.info.device, model.info.device_note) == ("cpu", "")


def test_a_plan_names_its_device_and_what_lies_there(small_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = dataclasses.replace(STANDIN, name="card", memory="card")
    install(monkeypatch, own, STANDIN)
    there, shared, here = (edgeinfer.plan(small_bundle, device=name) for name in ("card", "standin", "cpu"))
    assert (there.device, shared.device, here.device) == ("card", "standin", "cpu")
    assert there.terms["kv"] == 0 and there.footprint.device["kv"] == shared.terms["kv"] > 0
    assert there.footprint.device["weights"] > 0
    assert not shared.footprint.device and not here.footprint.device
    # What the weights are copied from may stay resident, so the process is not promised to be smaller.
    assert there.planned_bytes >= shared.planned_bytes - there.footprint.device["kv"] - there.terms["loading"]
    assert edgeinfer.plan(small_bundle, memory="500MB").device == "cpu"
    assert there.configuration.kv == "float32" and {way.configuration.kv for way in there.alternatives} <= {"float32"}
    assert {way.configuration.weights for way in there.alternatives} <= {"packed"}


def test_what_was_measured_on_one_device_is_not_anothers(small_bundle: Path) -> None:
    folders = []
    for device in ("cpu", "standin"):
        config = LoadOptions(device=device, native=False, threads=1)
        profile = profiles_of(open_model(small_bundle, config), config)("", draft_model=False)
        folders.append(profile._folder)
    assert None not in folders and folders[0] != folders[1]


def test_a_session_of_another_device_is_not_taken_for_its_own(small_bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.session"
    with edgeinfer.load(small_bundle, threads=1, device="standin") as model:
        chat = model.chat()
        chat.send(PROMPT, max_tokens=4)
        chat.save(file)
        assert model.load_chat(file).send("And?", max_tokens=2).timings.cached_prompt_tokens > 10
    with edgeinfer.load(small_bundle, threads=1, device="cpu", native=False) as model:
        assert model.load_chat(file).send("And?", max_tokens=2).timings.cached_prompt_tokens == 0


def test_a_draft_model_runs_beside_it_on_the_cpu(small_bundle: Path, expected: str) -> None:
    config = LoadOptions(device="standin", draft_model=str(small_bundle))
    subject = open_model(small_bundle, config)
    assert subject.drafter is not None
    assert (subject.device.name, subject.drafter.device.name) == ("standin", "cpu")
    with edgeinfer.load(small_bundle, threads=1, device="standin", draft_model=str(small_bundle)) as model:
        assert model.generate(PROMPT, speculation="model", **OPTIONS).text == expected


def test_devices_are_listed_and_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, STANDIN, BROKEN, dataclasses.replace(STANDIN, name="gone", provider="None"))
    found = {device.name: device for device in edgeinfer.list_devices()}
    assert list(found) == ["standin", "broken", "gone", "cpu"]
    assert found["standin"].check == found["cpu"].check == "ok"
    assert "broken" in found["broken"].check and found["broken"].installed
    assert not found["gone"].installed and found["gone"].hardware is None and found["gone"].check == ""
    assert found["cpu"].traits["custom_ops"] and not found["standin"].traits["custom_ops"]
    assert all(device.check == "" for device in edgeinfer.list_devices(check=False))
    install(monkeypatch, STANDIN, hardware=lambda device: False)
    assert edgeinfer.list_devices()[0].hardware is False
