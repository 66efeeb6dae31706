"""Bundles whose chat templates are hostile: a chat with them fails, and the model goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import edgeinfer
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.writing import seal
from edgeinfer.errors import TemplateError
from edgeinfer.runtime.text import render_process
from tests.runtime.text.hostile_templates import EXAMPLES, HOSTILE


def chat_of_hostile(bundle: Path, source: str) -> None:
    """Loads the bundle with another template and chats: it fails for its template, or answers."""
    manifest = open_bundle(bundle).manifest
    (bundle / "chat_template.jinja").write_bytes(source.encode("utf-8"))
    seal(bundle, manifest)
    try:
        model = edgeinfer.load(bundle, speculation="off")
    except TemplateError:  # it cannot be read
        return
    with model:
        try:
            model.chat().send("Hello", max_tokens=1)
        except edgeinfer.EdgeInferError as error:
            # What a template may build may still be no prompt for so small a model.
            assert isinstance(error, TemplateError) or "prompt" in error.message.lower(), source
        assert model.generate("Hello", max_tokens=1).text is not None


@pytest.fixture
def bundle(small_bundle: Path, tmp_path: Path) -> Path:
    return shutil.copytree(small_bundle, tmp_path / "bundle")


def test_a_hostile_bundle_fails_and_its_model_goes_on(bundle: Path) -> None:
    for source in EXAMPLES[:3]:
        chat_of_hostile(bundle, source)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_hostile_bundles_fail_and_their_models_go_on(bundle: Path, part: int) -> None:
    for source in HOSTILE[::8][part::4]:
        chat_of_hostile(bundle, source)


def test_a_closed_model_leaves_no_process(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[render_process.RenderProcess] = []
    plain = render_process.RenderProcess.ask

    def ask(process: render_process.RenderProcess, *arguments: object) -> object:
        started.append(process)
        return plain(process, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(render_process.RenderProcess, "ask", ask)
    with edgeinfer.load(bundle, speculation="off") as model:
        for end in (model.unload, model.close):
            model.chat().send("Hello", max_tokens=1)
            assert started[-1].pid is not None
            end()
            assert started[-1].pid is None
