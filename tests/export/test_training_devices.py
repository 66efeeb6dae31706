"""Trainings keep all that belongs together on the device that trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.export.training.dflash import DflashOptions
from edgeinfer.export.training.distill import KindOptions, distill
from edgeinfer.export.training.drafter import DrafterOptions, StudentSize, train_drafter
from edgeinfer.export.training.eagle import EagleOptions
from edgeinfer.export.training.exits import ExitsOptions, tune_exits
from edgeinfer.export.training.heads import HydraOptions, MedusaOptions
from edgeinfer.export.training.hydra_plus import HydraPlusOptions
from edgeinfer.export.training.models import Target, load_target
from edgeinfer.export.training.routers import RoutersOptions
from edgeinfer.export.training.text import TextSource
from tests.factories import make_checkpoint
from tests.other_device import OTHER, other_device

pytestmark = pytest.mark.slow

SHORT: dict[str, Any] = {"steps": 2, "samples": 0, "rows": 2, "length": 16, "threads": 1, "device": "cpu"}
SIZE = StudentSize(32, 2, 48, 2, 2)
KINDS: tuple[KindOptions[Any], ...] = (
    *(MedusaOptions(**SHORT), HydraOptions(**SHORT), RoutersOptions(**SHORT)),
    *(EagleOptions(**SHORT, tokens=120), DflashOptions(**SHORT, block=5), HydraPlusOptions(**SHORT, tokens=120)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
        options = DrafterOptions(**SHORT | {"samples": 20}, size=SIZE, minutes=None, **more)
        return lambda target, text, work: train_drafter(target, text, options, work)

    def exits(target: Target, text: TextSource, work: Path) -> object:
        few = {name: value for name, value in SHORT.items() if name != "samples"}
        return tune_exits(target, text, ExitsOptions(**few), work / "out", work)

    kinds = {options.kind: of_kind(options) for options in KINDS}
    return kinds | {"drafter": drafter(), "sorted": drafter(nested=True), "exits": exits}


def test_no_training_mixes_arrays_of_its_device_with_the_cpu_s(folder: Path, tmp_path: Path) -> None:
    """Found on CUDA, where `distill heads` failed: tokens of heads stayed on the CPU."""
    faults = {}
    for name, train in trainings().items():
        with other_device():
            target = load_target(folder / "target", OTHER)
            text = TextSource((folder / "text.jsonl",), target)
            try:
                train(target, text, tmp_path / name)
            except RuntimeError as error:
                faults[name] = str(error)
    assert not faults
