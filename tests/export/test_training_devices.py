"""Trainings keep all that belongs together on the device that trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.export.training.dflash import DflashOptions, train_dflash
from edgeinfer.export.training.drafter import DrafterOptions, train_drafter
from edgeinfer.export.training.eagle import EagleOptions, train_eagle
from edgeinfer.export.training.exits import ExitsOptions, tune_exits
from edgeinfer.export.training.heads import HeadsOptions, train_heads
from edgeinfer.export.training.hydra import HydraOptions, train_hydra
from edgeinfer.export.training.models import Target, load_target
from edgeinfer.export.training.sizing import StudentSize
from edgeinfer.export.training.text import TextSource
from tests.factories import make_checkpoint
from tests.other_device import OTHER, other_device

pytestmark = pytest.mark.slow

SHORT: dict[str, Any] = {"steps": 2, "samples": 0, "rows": 2, "length": 16, "threads": 1, "device": "cpu"}
SIZE = StudentSize(32, 2, 48, 2, 2)
HEADS: dict[str, dict[str, Any]] = {"medusa": {}, "hydra": {}, "prompt": {}, "routers": {"adapter_rank": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("devices")
    make_checkpoint(path / "target", "llama", num_hidden_layers=4, max_position_embeddings=48)
    lines = [json.dumps({"text": f"the cat ran to the dog and sat on it {i * i} times"}) for i in range(60)]
    (path / "text.jsonl").write_text("\n".join(lines), "utf-8")
    return path


Train = Callable[[Target, TextSource, Path], object]


def trainings(folder: Path) -> dict[str, Train]:
    """Every training, of few steps."""

    def heads(kind: str, more: dict[str, Any]) -> Train:
        return lambda target, text, work: train_heads(target, text, HeadsOptions(kind, **SHORT, **more), work)

    def drafter(**more: Any) -> Train:
        options = DrafterOptions(**SHORT | {"samples": 20}, size=SIZE, minutes=None, **more)
        return lambda target, text, work: train_drafter(target, text, options, work)

    def acceptance(target: Target, text: TextSource, work: Path) -> object:
        options = HeadsOptions("acceptance", **SHORT)
        return train_heads(target, text, options, work, drafter=load_target(folder / "target", OTHER))

    def exits(target: Target, text: TextSource, work: Path) -> object:
        few = {name: value for name, value in SHORT.items() if name != "samples"}
        return tune_exits(target, text, ExitsOptions(**few, speedups=(1.5,)), work / "out", work)

    return {
        **{kind: heads(kind, more) for kind, more in HEADS.items()},
        "acceptance": acceptance,
        "drafter": drafter(),
        "sorted": drafter(nested=True),
        "eagle": lambda *given: train_eagle(given[0], given[1], EagleOptions(**SHORT, tokens=120), given[2]),
        "dflash": lambda *given: train_dflash(given[0], given[1], DflashOptions(**SHORT, block=5), given[2]),
        "hydra-plus": lambda *given: train_hydra(given[0], given[1], HydraOptions(**SHORT, tokens=120), given[2]),
        "exits": exits,
    }


def test_no_training_mixes_arrays_of_its_device_with_the_cpu_s(folder: Path, tmp_path: Path) -> None:
    """Found on CUDA, where `distill heads` failed: tokens of heads stayed on the CPU."""
    faults = {}
    for name, train in trainings(folder).items():
        with other_device():
            target = load_target(folder / "target", OTHER)
            text = TextSource((folder / "text.jsonl",), target)
            try:
                train(target, text, tmp_path / name)
            except RuntimeError as error:
                faults[name] = str(error)
    assert not faults
