"""Draft modules that are trained draft on the engine what they learnt in torch, and from a command to a bundle."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from edgeinfer.apps.cli.main import main
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.core.errors import UsageError
from edgeinfer.core.results import Progress
from edgeinfer.export import exporter
from edgeinfer.export.options import ExportConfig
from edgeinfer.export.training.dflash import DflashOptions
from edgeinfer.export.training.distill import KindOptions, distill
from edgeinfer.export.training.drafter import DrafterOptions, StudentSize, train_drafter
from edgeinfer.export.training.eagle import EagleOptions
from edgeinfer.export.training.exits import ExitsOptions, tune_exits
from edgeinfer.export.training.heads import HydraOptions, MedusaOptions
from edgeinfer.export.training.hydra_plus import HydraPlusOptions
from edgeinfer.export.training.models import Target, load_target
from edgeinfer.export.training.modules import ModuleTask
from edgeinfer.export.training.routers import RoutersOptions
from edgeinfer.export.training.text import TextSource
from tests.cache import export_checkpoint
from tests.dflash_drafters import ReferenceDrafter
from tests.draft_modules import change_tensors, drafted_logits, drafter_of
from tests.eagle_heads import ReferenceHead
from tests.factories import make_checkpoint
from tests.hydra_modules import ReferenceHydra
from tests.other_device import OTHER, other_device
from tests.speculation import load_eager, same

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Kind:
    """A kind of modules."""

    options: KindOptions[Any]
    # What the published code drafts with, of a checkpoint and its target's: text and path -> (V,).
    logits: Callable[[Path, Path], Callable[[list[int], list[int]], torch.Tensor]]
    changed: tuple[dict[str, Any], str]  # an option that is given another value, and what is said of that
    refused: tuple[tuple[str, str], str]  # an option that is out of range, and what is said of that


SHORT: dict[str, Any] = {"steps": 40, "samples": 0, "rows": 4, "length": 24, "learning_rate": 5e-3}
SHORT |= {"device": "cpu", "threads": 1}
WORDS = "the cat ran to the dog and sat on it"


def head_logits(checkpoint: Path, target: Path) -> Callable[[list[int], list[int]], torch.Tensor]:
    return ReferenceHead(checkpoint, target).logits


def block_logits(checkpoint: Path, target: Path) -> Callable[[list[int], list[int]], torch.Tensor]:
    reference = ReferenceDrafter(checkpoint, target)
    return lambda text, path: reference.logits(text)[len(path)]


def heads_logits(checkpoint: Path, target: Path) -> Callable[[list[int], list[int]], torch.Tensor]:
    return ReferenceHydra(checkpoint, target).logits


KINDS = {
    "eagle": Kind(
        EagleOptions(**SHORT, depth=3, tokens=120),
        head_logits,
        ({"depth": 2}, "depth was 3, is 2"),
        (("--depth", "0"), "depth must be from 1 to 16"),
    ),
    "dflash": Kind(
        DflashOptions(**SHORT | {"steps": 80, "learning_rate": 1e-2}, block=5, anchors=16, layers=2),
        block_logits,
        ({"anchors": 9}, "anchors was 16, is 9"),
        (("--block", "65"), "block must be from 2 to 64"),
    ),
    "hydra-plus": Kind(
        HydraPlusOptions(**SHORT, tokens=120),
        heads_logits,
        ({"layers": 2}, "layers was 4, is 2"),
        (("--count", "9"), "count must be from 1 to 8"),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that is sure of what it says, and a text."""
    path = tmp_path_factory.mktemp("modules")
    make_checkpoint(path / "target", "llama", num_hidden_layers=4, max_position_embeddings=256)
    change_tensors(lambda tensors: tensors["model.norm.weight"].mul_(8))(path / "target")
    lines = [json.dumps({"text": f"{WORDS} {i * i} times"}) for i in range(200)]
    (path / "text.jsonl").write_text("\n".join(lines), "utf-8")
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(folder / "target")


@pytest.fixture(scope="module")
def text(folder: Path, target: Target) -> TextSource:
    return TextSource((folder / "text.jsonl",), target)


@pytest.mark.parametrize("kind", KINDS)
def test_training_makes_it_better_and_an_interrupted_one_ends_alike(
    kind: str, folder: Path, target: Target, text: TextSource, tmp_path: Path
) -> None:
    """A trained module drafts on the engine what a torch reference of the published code computes."""
    made = KINDS[kind]
    whole = distill(target, text, made.options, tmp_path / "whole")
    assert np.mean(whole.trained.losses[-5:]) < 0.7 * np.mean(whole.trained.losses[:5])
    assert whole.after["drafted token 1"] > whole.before["drafted token 1"] + 0.05
    with pytest.raises(KeyboardInterrupt):
        distill(target, text, made.options, tmp_path / "work", progress=_stop_at(17))
    found = distill(target, text, made.options, tmp_path / "work")
    assert found.trained.resumed_at == 17 and found.trained.losses == whole.trained.losses
    for name, each in (("ours", found), ("theirs", whole)):
        assert isinstance(each.task, ModuleTask)
        each.task.save(tmp_path / name)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    changed, message = made.changed
    with pytest.raises(UsageError, match=f"another configuration: {message}"):
        distill(target, text, replace(made.options, **changed), tmp_path / "work")
    bundle = exporter.export_checkpoint(
        folder / "target", tmp_path / "out", ExportConfig(bits=32, drafter=tmp_path / "theirs")
    )
    _compare(bundle, kind, made.logits(tmp_path / "theirs", folder / "target"))


def _stop_at(step: int) -> Progress:
    def progress(name: str, done: int, total: int) -> None:
        if done == step:
            raise KeyboardInterrupt

    return progress


def _compare(bundle: Path, kind: str, logits: Callable[[list[int], list[int]], torch.Tensor]) -> None:
    prompt = [5 + place % 7 for place in range(40)]
    with load_eager(bundle, context=128, speculation=kind, remember=False) as model:
        said = [*prompt, *model.generate(prompt, max_tokens=12, ignore_eos=True).token_ids]
        drafter = drafter_of(model, kind)
        drafter.begin(said)
        for path in ([], [7], [7, 9, 11]):
            found, expected = drafted_logits(drafter, said, path), logits(said, path).numpy()
            assert found is not None
            possible = np.isfinite(expected)
            np.testing.assert_allclose(found[possible], expected[possible], atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "source"), [("eagle", "bundle"), ("eagle", "qwen3-moe"), ("dflash", "bundle"), ("hydra-plus", "bundle")]
)
def test_the_command_makes_a_bundle_with_a_module(
    kind: str, source: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bundle's weights stay as they are; a checkpoint of any family is exported with the module."""
    model = tmp_path / source
    if source == "bundle":
        export_checkpoint(folder / "target", model, ExportConfig(bits=8))
    else:
        make_checkpoint(model, source, num_hidden_layers=3, max_position_embeddings=256)
    options = ["--text", folder / "text.jsonl", "--steps", 3, "--rows", 2, "--length", 24, "--samples", 400]
    arguments = ["distill", kind, model, tmp_path / "out", *options, "-t", 1, "--device", "cpu", "--json"]
    assert main([str(each) for each in arguments]) == 0, capsys.readouterr().err
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    drafter = tmp_path / "out" / "drafter"
    assert facts["bytes"] == sum(each.stat().st_size for each in drafter.iterdir())
    places = {"eagle": 5, "dflash": 7, "hydra-plus": 4}[kind]
    assert len(facts["before"]) == len(facts["after"]) == places and facts["engine"]["mean_accepted_length"] >= 1
    module = open_bundle(drafter).manifest.module
    assert module is not None and module.drafter == kind
    if source == "bundle":
        assert (tmp_path / "out" / "weights.bin").read_bytes() == (model / "weights.bin").read_bytes()
    with load_eager(tmp_path / "out", context=128, remember=False) as loaded:
        assert same(loaded, kind, prompt=[5, 6, 7, 8], max_tokens=16, ignore_eos=True).exact


def test_what_cannot_have_a_module_is_refused_at_once(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    portable = export_checkpoint(
        folder / "target", tmp_path / "portable", ExportConfig(layout="portable", bits=4, calibration="none")
    )
    for kind, made in KINDS.items():

        def refused(source: Path, out: Path, code: int, *more: str, kind: str = kind) -> str:
            arguments = ["distill", kind, source, out, "--text", folder / "text.jsonl", "--steps", 2, *more]
            assert main([str(each) for each in arguments]) == code
            return capsys.readouterr().err

        assert "its layout is not native" in refused(portable, tmp_path / "out", 2)
        assert "already exists" in refused(folder / "target", folder, 5)
        wrong, message = made.refused
        assert message in refused(folder / "target", tmp_path / "out", 2, *wrong)
        with monkeypatch.context() as without:
            without.setenv("EDGEINFER_NATIVE", "0")
            assert "needs the native kernel" in refused(folder / "target", tmp_path / "out", 2)
        assert not (tmp_path / "out").exists()


def test_minutes_become_steps_and_replies(target: Target, text: TextSource, tmp_path: Path) -> None:
    made = KINDS["dflash"]
    timed = replace(made.options, steps=None, minutes=0.05, samples=None)
    with pytest.raises(KeyboardInterrupt):
        distill(target, text, timed, tmp_path, None, _stop)
    found = json.loads((tmp_path / "schedule.json").read_text())
    assert found["steps"] >= 1 and found["samples"] > 0 and found["minutes"] == 0.05
    with pytest.raises(UsageError, match="another time limit"):
        distill(target, text, replace(timed, minutes=0.1), tmp_path)


def _stop(name: str, done: int, total: int) -> None:
    raise KeyboardInterrupt


FEW: dict[str, Any] = {"steps": 2, "samples": 0, "rows": 2, "length": 16, "threads": 1, "device": "cpu"}
SIZE = StudentSize(32, 2, 48, 2, 2)
DEVICE_KINDS: tuple[KindOptions[Any], ...] = (
    *(MedusaOptions(**FEW), HydraOptions(**FEW), RoutersOptions(**FEW)),
    *(EagleOptions(**FEW, tokens=120), DflashOptions(**FEW, block=5), HydraPlusOptions(**FEW, tokens=120)),
)


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("devices")
    make_checkpoint(path / "target", "llama", num_hidden_layers=4, max_position_embeddings=48)
    lines = [json.dumps({"text": f"the cat ran to the dog and sat on it {i * i} times"}) for i in range(60)]
    (path / "text.jsonl").write_text("\n".join(lines), "utf-8")
    return path


Train = Callable[[Target, TextSource, Path], object]


def trainings() -> dict[str, Train]:
    """Every training, of few steps."""

    def of_kind(options: KindOptions[Any]) -> Train:
        return lambda target, text, work: distill(target, text, options, work)

    def drafter(**more: Any) -> Train:
        options = DrafterOptions(**FEW | {"samples": 20}, size=SIZE, minutes=None, **more)
        return lambda target, text, work: train_drafter(target, text, options, work)

    def exits(target: Target, text: TextSource, work: Path) -> object:
        few = {name: value for name, value in FEW.items() if name != "samples"}
        return tune_exits(target, text, ExitsOptions(**few), work / "out", work)

    kinds = {options.kind: of_kind(options) for options in DEVICE_KINDS}
    return kinds | {"drafter": drafter(), "sorted": drafter(nested=True), "exits": exits}


def test_no_training_mixes_arrays_of_its_device_with_the_cpu_s(devices: Path, tmp_path: Path) -> None:
    """Found on CUDA, where `distill heads` failed: tokens of heads stayed on the CPU."""
    faults = {}
    for name, train in trainings().items():
        with other_device():
            target = load_target(devices / "target", OTHER)
            text = TextSource((devices / "text.jsonl",), target)
            try:
                train(target, text, tmp_path / name)
            except RuntimeError as error:
                faults[name] = str(error)
    assert not faults
