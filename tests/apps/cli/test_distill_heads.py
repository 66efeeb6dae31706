"""`edgeinfer distill heads` and `routers` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeinfer.apps.cli.main import main
from edgeinfer.bundle.additions import has_heads
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.writing import MANIFEST
from edgeinfer.export.options import ExportConfig
from tests.cache import export_checkpoint
from tests.factories import make_checkpoint

pytestmark = pytest.mark.usefixtures("told_costs")

TRAINED = ("--steps", "3", "--rows", "2", "--length", "16", "-t", "1", "--json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("distill")
    make_checkpoint(path / "target-checkpoint", "llama")
    export_checkpoint(path / "target-checkpoint", path / "target", ExportConfig(8, keep_small=False))
    lines = [json.dumps({"text": f"The little dog number {n} had a red ball and ran {n} times."}) for n in range(16)]
    (path / "text.jsonl").write_text("\n".join(lines), "utf-8")
    return path


def distill(capsys: pytest.CaptureFixture[str], kind: str, *options: object) -> tuple[int, str, str]:
    code = main(["distill", kind, *map(str, options)])
    told = capsys.readouterr()
    return code, told.out, told.err


@pytest.mark.parametrize("kind", ["medusa", pytest.param("hydra", marks=pytest.mark.slow)])
def test_heads_are_trained_into_a_copy_and_draft_there(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, kind: str
) -> None:
    before = (folder / "target" / MANIFEST).read_bytes()
    options = ("--kind", kind, "--count", 2, "--text", folder / "text.jsonl", *TRAINED)
    code, out, _ = distill(capsys, "heads", folder / "target", tmp_path / "made", *options)
    facts = json.loads(out)
    assert code == 0 and facts["kind"] == kind and facts["steps"] == 3 and "losses" not in facts
    assert set(facts["before"]) == set(facts["after"]) == {"agreement at place 1", "agreement at place 2"}
    assert facts["engine"]["mean_accepted_length"] >= 1
    made = open_bundle(tmp_path / "made")
    made.verify()
    assert has_heads(made, kind) and (folder / "target" / MANIFEST).read_bytes() == before
    assert not (tmp_path / "made.work").exists()


def test_routers_go_into_a_copy_or_the_bundle_itself(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    made, report = tmp_path / "routed", tmp_path / "report.json"
    text = ("--text", folder / "text.jsonl", "--report", report)
    assert distill(capsys, "routers", folder / "target", made, *text, *TRAINED, "--keep", 0.5)[0] == 0
    assert len(json.loads(report.read_text("utf-8"))["losses"]) == 3
    code, out, err = distill(capsys, "routers", made, made, *text, *TRAINED[:-1])
    assert code == 0 and "layers kept" in out and "--compute routers" in err
    found = open_bundle(made)
    found.verify()
    assert has_heads(found, "routers")


def test_what_cannot_be_done_is_said_before_any_training(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    text = ("--text", folder / "text.jsonl", *TRAINED)
    (tmp_path / "there").mkdir()
    short = tmp_path / "short.txt"
    short.write_text("Too short.", "utf-8")
    medusa = ("--kind", "medusa")
    cases = (
        (2, "is not a bundle", "heads", folder / "target-checkpoint", tmp_path / "x", *medusa, *text),
        (5, "already exists", "heads", folder / "target", tmp_path / "there", *medusa, *text),
        (2, "--count 9", "heads", folder / "target", tmp_path / "x", *medusa, "--count", 9, *text),
        (2, "--keep 0", "routers", folder / "target", tmp_path / "x", "--keep", 0, *text),
        (2, "are needed", "heads", folder / "target", tmp_path / "x", *medusa, "--text", short, *TRAINED),
    )
    for code, says, *command in cases:
        found, _, err = distill(capsys, *command)  # type: ignore[arg-type]
        assert (found, says in err) == (code, True), err
        assert len(err.strip().splitlines()) <= 2
    assert not (tmp_path / "x").exists()
