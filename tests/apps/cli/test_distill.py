"""`edgeinfer distill` from end to end on random targets: drafters, early exits, heads and routers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.apps.cli.main import main
from edgeinfer.bundle.additions import has_heads
from edgeinfer.bundle.opening import (
    NESTED,
    add_figures,
    exit_figure,
    nest_drafter,
    nested_drafter,
    open_bundle,
    trained_depths,
)
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.writing import MANIFEST
from edgeinfer.core.errors import BundleError, StorageError, UsageError
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.export.options import ExportConfig
from edgeinfer.loading import open_model, within_budget
from edgeinfer.tools.distilling import ModelReplier, measure_drafter
from tests.cache import export_checkpoint
from tests.cli import leave_out
from tests.factories import make_checkpoint
from tests.tables import each_row

pytestmark = pytest.mark.usefixtures("told_costs")

QUICK = ["--steps", "3", "--rows", "2", "--length", "16", "--samples", "640", "-t", "1", "--device", "cpu"]
TRAINED = ("--steps", "3", "--rows", "2", "--length", "16", "-t", "1", "--json")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "target"
    make_checkpoint(folder, "llama", max_position_embeddings=128)
    return folder


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_checkpoint(checkpoint, tmp_path_factory.mktemp("bundle") / "target", ExportConfig(bits=8))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    make_checkpoint(folder / "checkpoint", "llama", num_hidden_layers=2, seed=4)
    return export_checkpoint(folder / "checkpoint", folder / "bundle", ExportConfig(bits=8))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = [json.dumps({"text": f"the cat number {i} ran to the dog and sat on it {i * i} times"}) for i in range(16)]
    file.write_text("\n".join(lines), "utf-8")
    return file


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main([str(each) for each in arguments]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def distill(capsys: pytest.CaptureFixture[str], kind: str, *options: object) -> tuple[int, str, str]:
    code = main(["distill", kind, *map(str, options)])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_a_drafter_is_made_measured_and_nested(
    bundle: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, into, file = tmp_path / "drafter", tmp_path / "both", tmp_path / "report.json"
    options = ["--text", text, "--size", "64x1", "--into", into, "--report", file, "--json", *QUICK]
    facts = run(capsys, "distill", "drafter", bundle, out, *options)
    assert facts["size"]["width"] == 64 and facts["bundle"] == str(out)
    assert facts["bytes"] == sum(each.stat().st_size for each in out.rglob("*"))
    assert 0 <= facts["engine"]["acceptance_rate"] <= 1 <= facts["engine"]["mean_accepted_length"]
    assert "losses" not in facts and len(json.loads(file.read_text())["losses"]["distilling"]) == 2
    assert not (tmp_path / "drafter.work").exists()
    assert open_bundle(into).manifest.drafters == (NESTED,)
    with edgeinfer.load(into, remember=False) as model, edgeinfer.load(bundle, speculation="off") as plain:
        ours = model.generate([0, 9, 8], max_tokens=12, speculation="model")
        assert ours.token_ids == plain.generate([0, 9, 8], max_tokens=12).token_ids


def test_a_drafter_of_a_checkpoint_is_drawn_from_in_torch(
    checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--text", text, "--size", "64x2", "--json", *QUICK]
    facts = run(capsys, "distill", "sorted", checkpoint, tmp_path / "out", *options)
    assert "engine" not in facts and "after_1_layers" in facts["acceptance"]
    manifest = open_bundle(tmp_path / "out").manifest
    assert trained_depths(manifest) == (1,)
    assert manifest.figures[exit_figure(1)] == facts["acceptance"]["after_1_layers"]["agreement"]


def test_exits_are_written_as_a_checkpoint(
    checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--text", text, "--json", "--steps", "3", "--rows", "2", "--length", "16", "-t", "1", "--device", "cpu"]
    facts = run(capsys, "distill", "exits", checkpoint, tmp_path / "out", *options)
    assert set(facts["before"]) == set(facts["after"]) == {"1", "2"}
    assert export_checkpoint(tmp_path / "out", tmp_path / "bundle", ExportConfig(bits=8)).is_dir()


@each_row("kind", ["drafter", "exits", "sorted"])
def test_what_is_there_is_not_overwritten(
    kind: str, checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    assert main(["distill", kind, str(checkpoint), str(tmp_path / "out"), "--text", str(text), *QUICK[:2]]) == 5
    assert "already exists" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_bad_requests_say_what_to_do(
    checkpoint: Path, bundle: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*more: str | Path, source: Path = bundle) -> str:
        arguments = ["distill", "drafter", source, tmp_path / "out", *more]
        assert main([str(each) for each in arguments]) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    assert "--text" in refused("--steps", "3")
    assert "like 128x1" in refused("--text", text, "--size", "wide")
    assert "and 64 are needed" in refused("--text", _write(tmp_path / "s.txt", "a cat"), "--size", "64x1", *QUICK)
    assert "Export it first" in refused("--text", text, "--into", tmp_path / "into", source=checkpoint)
    assert "not allowed with" in refused("--text", text, "--steps", "3", "--minutes", "2")
    assert ".txt" in refused("--text", tmp_path / "none.txt", "--size", "64x1", *QUICK)


def _write(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


def test_another_configuration_does_not_go_on(
    checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = ["distill", "drafter", str(checkpoint), str(tmp_path / "a"), "--text", str(text), *QUICK, "--json"]
    work = ["--work", str(tmp_path / "work")]
    assert main([*begin, "--size", "64x1", *work]) == 0
    capsys.readouterr()
    again = ["distill", "drafter", str(checkpoint), str(tmp_path / "b"), *begin[4:]]
    assert main([*again, "--size", "96x1", *work]) == 2
    assert "another configuration: size" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
    # Under the same one nothing is trained again.
    facts = run(capsys, *again, "--size", "64x1", *work)
    assert facts["resumed_at"] == {"reading": 1, "distilling": 2}


def test_cuda_that_is_not_there_is_said(
    checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = ["--text", str(text), "--size", "64x1", "--device", "cuda"]
    assert main(["distill", "drafter", str(checkpoint), str(tmp_path / "out"), *options]) == 5
    assert "no CUDA device" in capsys.readouterr().err


def test_without_torch_the_extra_is_named(
    checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out("torch", "edgeinfer.export.training", monkeypatch)
    assert main(["distill", "exits", str(checkpoint), str(tmp_path / "out"), "--text", str(text)]) == 2
    assert "pip install 'edgeinfer[train]'" in capsys.readouterr().err


# Drafters inside of bundles


@pytest.fixture
def both(bundle: Path, small: Path, tmp_path: Path) -> Bundle:
    return nest_drafter(bundle, small, tmp_path / "both")


def test_a_nested_drafter_is_its_bundle_without_what_it_does_not_use(both: Bundle, bundle: Path, small: Path) -> None:
    inner = nested_drafter(both)
    assert inner is not None and inner.path == both.path / NESTED
    assert inner.manifest.tensors == open_bundle(small).manifest.tensors
    assert not any("kv-" in name for name in inner.manifest.files)
    both.verify()
    assert nested_drafter(open_bundle(bundle)) is None
    for name in open_bundle(bundle).manifest.files:
        assert (both.path / name).read_bytes() == (bundle / name).read_bytes()


def test_a_drafter_takes_the_place_of_an_older_one(both: Bundle, bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="exists"):
        nest_drafter(both.path, bundle, both.path)
    other = nest_drafter(both.path, bundle, tmp_path / "other")
    assert other.manifest.drafters == (NESTED,)
    inner = nested_drafter(other)
    assert inner is not None and inner.manifest.geometry.num_layers == 3
    with pytest.raises(UsageError, match="itself contains a drafter"):
        nest_drafter(bundle, other.path, tmp_path / "third")
    (inner.path / "edgeinfer.json").write_text("{}")
    with pytest.raises(BundleError):
        open_bundle(other.path)


@pytest.mark.parametrize(
    ("options", "drafts"),
    [
        ({}, True),
        ({"speculation": "model"}, True),
        ({"speculation": "copy,ngram"}, False),
        ({"speculation": "off"}, False),
        ({"draft_model": "off"}, False),
        ({"memory": "20GB"}, True),
    ],
)
def test_a_nested_drafter_drafts_where_it_may(both: Bundle, options: dict[str, Any], drafts: bool) -> None:
    config = LoadOptions.of(remember=False, **options)
    found, _ = within_budget(open_model(both.path, config), config)
    assert (found.drafter is not None) == drafts


def test_a_draft_model_that_is_given_goes_before_the_nested_one(both: Bundle, bundle: Path) -> None:
    found = open_model(both.path, LoadOptions.of(remember=False, draft_model=bundle))
    assert found.drafter is not None and found.drafter.bundle.path == bundle


def test_the_built_in_model_brings_a_small_drafter() -> None:
    found = open_model(None, LoadOptions.of(remember=False))
    assert found.drafter is not None
    assert sum(file.stat().st_size for file in found.drafter.bundle.path.rglob("*")) < 600_000
    with edgeinfer.load(remember=False) as model:
        drafted = model.generate("Once upon a time", max_tokens=24, speculation="model")
        plain = model.generate("Once upon a time", max_tokens=24, speculation="off")
    assert drafted.token_ids == plain.token_ids


def test_figures_are_added_to_a_manifest(both: Bundle) -> None:
    add_figures(both, {exit_figure(1): 0.5})
    again = open_bundle(both.path)
    assert again.manifest.figures == {exit_figure(1): 0.5} and trained_depths(again.manifest) == (1,)
    assert again.manifest.files == both.manifest.files


def test_replies_of_the_engine_are_those_it_would_give() -> None:
    story = "Tim had a dog. Tim and Sam ran. Sam was glad and Tim too."
    turns = [("user", "Tell me a story about Tim."), ("assistant", story), ("user", "Who is in the story?")]
    with edgeinfer.load(remember=False, speculation="off") as model:
        messages = [{"role": role, "content": content} for role, content in turns]
        prompt = np.array(model.tokenize_chat(messages), np.int64)
        replier = ModelReplier(model)
        replies = replier.replies([prompt, prompt], [0.0, 1.0], 60, 1)
        assert replies == replier.replies([prompt, prompt], [0.0, 1.0], 60, 1)
        assert model.generate(prompt.tolist(), max_tokens=60).token_ids == tuple(replies[0])
        # The end is a token to learn too, and comes once.
        assert [token in model.end_ids for token in replies[0]].index(True) == len(replies[0]) - 1
        assert replier.replies([prompt], [0.0], 2, 0) == [replies[0][:2]]


def test_measuring_compares_with_plain_decoding(bundle: Path, small: Path) -> None:
    with pytest.raises(UsageError, match="no prompts"):
        measure_drafter(bundle, small, [])
    seen: list[tuple[str, int, int]] = []
    found = measure_drafter(bundle, bundle, [[0, 5, 6], [0, 7]], tokens=12, progress=lambda *args: seen.append(args))
    assert seen == [("measuring", 0, 2), ("measuring", 1, 2)]
    assert found.mean_accepted_length >= 1 and found.speedup > 0


@pytest.mark.parametrize("kind", ["medusa", pytest.param("hydra", marks=pytest.mark.slow)])
def test_heads_are_trained_into_a_copy_and_draft_there(
    capsys: pytest.CaptureFixture[str], bundle: Path, text: Path, tmp_path: Path, kind: str
) -> None:
    before = (bundle / MANIFEST).read_bytes()
    options = ("--kind", kind, "--count", 2, "--text", text, *TRAINED)
    code, out, _ = distill(capsys, "heads", bundle, tmp_path / "made", *options)
    facts = json.loads(out)
    assert code == 0 and facts["kind"] == kind and facts["steps"] == 3 and "losses" not in facts
    assert set(facts["before"]) == set(facts["after"]) == {"agreement at place 1", "agreement at place 2"}
    assert facts["engine"]["mean_accepted_length"] >= 1
    made = open_bundle(tmp_path / "made")
    made.verify()
    assert has_heads(made, kind) and (bundle / MANIFEST).read_bytes() == before
    assert not (tmp_path / "made.work").exists()


def test_routers_go_into_a_copy_or_the_bundle_itself(
    capsys: pytest.CaptureFixture[str], bundle: Path, text: Path, tmp_path: Path
) -> None:
    made, report = tmp_path / "routed", tmp_path / "report.json"
    options = ("--text", text, "--report", report)
    assert distill(capsys, "routers", bundle, made, *options, *TRAINED, "--keep", 0.5)[0] == 0
    assert len(json.loads(report.read_text("utf-8"))["losses"]) == 3
    code, out, err = distill(capsys, "routers", made, made, *options, *TRAINED[:-1])
    assert code == 0 and "layers kept" in out and "--compute routers" in err
    found = open_bundle(made)
    found.verify()
    assert has_heads(found, "routers")


def test_impossible_heads_and_routers_are_refused_before_any_training(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, bundle: Path, text: Path, tmp_path: Path
) -> None:
    options = ("--text", text, *TRAINED)
    (tmp_path / "there").mkdir()
    short = tmp_path / "short.txt"
    short.write_text("Too short.", "utf-8")
    medusa = ("--kind", "medusa")
    cases = (
        (2, "is not a bundle", "heads", checkpoint, tmp_path / "x", *medusa, *options),
        (5, "already exists", "heads", bundle, tmp_path / "there", *medusa, *options),
        (2, "--count 9", "heads", bundle, tmp_path / "x", *medusa, "--count", 9, *options),
        (2, "--keep 0", "routers", bundle, tmp_path / "x", "--keep", 0, *options),
        (2, "are needed", "heads", bundle, tmp_path / "x", *medusa, "--text", short, *TRAINED),
    )
    for code, says, *command in cases:
        found, _, err = distill(capsys, *command)  # type: ignore[arg-type]
        assert (found, says in err) == (code, True), err
        assert len(err.strip().splitlines()) <= 2
    assert not (tmp_path / "x").exists()
