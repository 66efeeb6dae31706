"""EAGLE heads that are trained draft on the engine what they learnt in torch, and from a command to a bundle."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from edgeinfer.apps.cli.main import main
from edgeinfer.bundle import open_bundle
from edgeinfer.errors import UsageError
from edgeinfer.export import ExportConfig
from edgeinfer.export import export_checkpoint as export_anew
from edgeinfer.export.training.eagle import EagleOptions, train_eagle
from edgeinfer.export.training.models import Target, load_target
from edgeinfer.export.training.text import TextSource
from edgeinfer.results import Progress
from edgeinfer.runtime.speculation.drafters.contract import Context
from edgeinfer.runtime.speculation.drafters.eagle import EagleDrafter
from tests.cache import export_checkpoint
from tests.eagle_heads import ReferenceHead
from tests.factories import make_checkpoint
from tests.speculation import load_eager, same

pytestmark = pytest.mark.slow

OPTIONS = EagleOptions(
    steps=40, samples=0, depth=3, tokens=120, rows=4, length=24, learning_rate=5e-3, device="cpu", threads=1
)
WORDS = "the cat ran to the dog and sat on it"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that says words of a text again, and the text."""
    path = tmp_path_factory.mktemp("eagle")
    make_checkpoint(path / "target", "llama", num_hidden_layers=4, max_position_embeddings=256)
    lines = [json.dumps({"text": f"{WORDS} {i * i} times"}) for i in range(200)]
    (path / "text.jsonl").write_text("\n".join(lines), "utf-8")
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(folder / "target")


@pytest.fixture(scope="module")
def text(folder: Path, target: Target) -> TextSource:
    return TextSource((folder / "text.jsonl",), target)


def test_training_makes_it_better_and_an_interrupted_one_ends_alike(
    folder: Path, target: Target, text: TextSource, tmp_path: Path
) -> None:
    """A trained head drafts on the engine what a torch reference of the published code computes."""
    whole = train_eagle(target, text, OPTIONS, tmp_path / "whole")
    assert np.mean(whole.trained.losses[-5:]) < 0.6 * np.mean(whole.trained.losses[:5])
    assert whole.after[0] > whole.before[0] + 0.1
    with pytest.raises(KeyboardInterrupt):
        train_eagle(target, text, OPTIONS, tmp_path / "work", progress=_stop_at(17))
    found = train_eagle(target, text, OPTIONS, tmp_path / "work")
    assert found.trained.resumed_at == 17 and found.trained.losses == whole.trained.losses
    ours, theirs = (load_file(each.checkpoint / "model.safetensors") for each in (found, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with pytest.raises(UsageError, match="another configuration: depth was 3, is 2"):
        train_eagle(target, text, replace(OPTIONS, depth=2), tmp_path / "work")
    config = ExportConfig(bits=32, drafter=whole.checkpoint)
    _compare(
        export_anew(folder / "target", tmp_path / "out", config), ReferenceHead(whole.checkpoint, folder / "target")
    )


def _stop_at(step: int) -> Progress:
    def progress(name: str, done: int, total: int) -> None:
        if done == step:
            raise KeyboardInterrupt

    return progress


def _compare(bundle: Path, reference: ReferenceHead) -> None:
    prompt = [5 + place % 7 for place in range(40)]
    with load_eager(bundle, context=128, speculation="eagle", remember=False) as model:
        reply = [*model.generate(prompt, max_tokens=12, ignore_eos=True).token_ids]
        drafter = model._parts.speculator._drafter("eagle")
        assert isinstance(drafter, EagleDrafter)
        drafter.begin([*prompt, *reply])
        context = Context([*prompt, *reply], lambda logits, drafted: (0, None), lambda drafted: ())
        for path in ([], [7], [7, 9, 11]):
            found = drafter._logits(context, path)
            assert found is not None
            expected = reference.logits([*prompt, *reply], path).numpy()
            possible = np.isfinite(expected)
            np.testing.assert_allclose(found[possible], expected[possible], atol=1e-4)


@pytest.mark.parametrize("kind", ["bundle", "checkpoint"])
def test_the_command_makes_a_bundle_with_a_head(
    kind: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a bundle, whose weights stay as they are, and of a checkpoint of any family, which is exported with it."""
    if kind == "bundle":
        source = export_checkpoint(folder / "target", tmp_path / "bundle", ExportConfig(bits=8))
    else:
        source = tmp_path / "mixture"
        make_checkpoint(source, "qwen3-moe", num_hidden_layers=3, max_position_embeddings=256)
    options = ["--text", folder / "text.jsonl", "--steps", 3, "--rows", 2, "--length", 24, "--samples", 400]
    arguments = ["distill", "eagle", source, tmp_path / "out", *options, "-t", 1, "--device", "cpu", "--json"]
    assert main([str(each) for each in arguments]) == 0, capsys.readouterr().err
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    drafter = tmp_path / "out" / "drafter"
    assert facts["bytes"] == sum(each.stat().st_size for each in drafter.iterdir())
    assert len(facts["before"]) == len(facts["after"]) == 5 and facts["engine"]["mean_accepted_length"] >= 1
    assert open_bundle(drafter).manifest.module is not None
    if kind == "bundle":
        assert (tmp_path / "out" / "weights.bin").read_bytes() == (source / "weights.bin").read_bytes()
    with load_eager(tmp_path / "out", context=128, remember=False) as model:
        assert same(model, "eagle", prompt=[5, 6, 7, 8], max_tokens=16, ignore_eos=True).exact


def test_what_cannot_have_a_head_is_refused_at_once(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    portable = export_checkpoint(folder / "target", tmp_path / "portable", ExportConfig(layout="portable"))

    def refused(source: Path, out: Path, code: int, *more: str) -> str:
        arguments = ["distill", "eagle", source, out, "--text", folder / "text.jsonl", "--steps", 2, *more]
        assert main([str(each) for each in arguments]) == code
        return capsys.readouterr().err

    assert "its layout is not native" in refused(portable, tmp_path / "out", 2)
    assert "already exists" in refused(folder / "target", folder, 5)
    assert "depth must be from 1 to 16" in refused(folder / "target", tmp_path / "out", 2, "--depth", "0")
    assert not (tmp_path / "out").exists()


def test_minutes_become_steps_and_replies(target: Target, text: TextSource, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_eagle(target, text, replace(OPTIONS, steps=None, minutes=0.05, samples=None), tmp_path, None, _stop)
    found = json.loads((tmp_path / "schedule.json").read_text())
    assert found["steps"] >= 1 and found["samples"] > 0 and found["minutes"] == 0.05
    with pytest.raises(UsageError, match="another time limit"):
        train_eagle(target, text, replace(OPTIONS, steps=None, minutes=0.1, samples=None), tmp_path)


def _stop(name: str, done: int, total: int) -> None:
    raise KeyboardInterrupt
