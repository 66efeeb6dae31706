"""LongRoPE: factors follow the length of the text as transformers' do, below, across and above the border."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import edgeinfer
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from tests.export.passes import expected_logits
from tests.factories import make_checkpoint

BORDER, CONTEXT, REPLY = 32, 96, 24
TEXT = np.random.default_rng(0).integers(2, 320, 60).tolist()
Made = tuple[Any, Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("long-rotation")
    model = make_checkpoint(folder / "checkpoint", "phi3-longrope", eos_token_id=None)
    return model, export_checkpoint(folder / "checkpoint", folder / "bundle", ExportConfig(bits=32))


def load(bundle: Path, **options: Any) -> Any:
    return edgeinfer.load(bundle, context=CONTEXT, **({"speculation": "off"} | options))


def said(model: edgeinfer.Model, prompt: list[int], **options: Any) -> list[int]:
    reply = model.generate(prompt, max_tokens=REPLY, temperature=0, ignore_eos=True, **options)
    return list(reply.token_ids)


def theirs(model: Any, prompt: list[int]) -> list[int]:
    """Greedy text of transformers, which evaluates a text again where it grows past the border."""
    tokens = list(prompt)
    for _ in range(REPLY):
        tokens.append(int(expected_logits(model, np.array(tokens))[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module", params=["onnx", "reference"])
def loaded(request: pytest.FixtureRequest, made: Made) -> Iterator[edgeinfer.Model]:
    with load(made[1], backend=request.param) as model:
        yield model


@pytest.mark.every_case
@pytest.mark.parametrize("size", [6, 20, 31, 32, 33, 50])
def test_replies_equal_transformers(made: Made, loaded: edgeinfer.Model, size: int) -> None:
    assert said(loaded, TEXT[:size]) == theirs(made[0], TEXT[:size])


def test_transformers_own_generation_says_so_too(made: Made) -> None:
    given = torch.tensor([TEXT[:20]])
    with torch.no_grad():
        reply = made[0].generate(given, max_new_tokens=REPLY, do_sample=False, attention_mask=torch.ones_like(given))
    assert reply[0, 20:].tolist() == theirs(made[0], TEXT[:20])


def test_logits_of_a_text_are_by_its_length(made: Made, loaded: edgeinfer.Model) -> None:
    for size in (BORDER, BORDER + 1, 12):
        logits = np.concatenate([rows.copy() for rows in loaded.logits(TEXT[:size])])
        assert np.abs(logits - expected_logits(made[0], np.array(TEXT[:size]))).max() <= 1e-4


def test_drafts_other_conversations_and_sessions_change_nothing(made: Made, tmp_path: Path) -> None:
    # A text that repeats itself, so that drafts are made and accepted on both sides of the border.
    text = (TEXT[:5] * 6)[:26]
    with load(made[1], cache={"prefix_cache": "1MB"}, prefill_chunk=16) as plain:
        wanted, other = said(plain, text), said(plain, TEXT[:40])
    with load(made[1], speculation="ngram", cache={"prefix_cache": "1MB"}) as model:
        for _ in range(2):
            assert said(model, text) == wanted
            assert said(model, TEXT[:40]) == other
        said(model, text)
        model.save_session(tmp_path / "session")
        model.load_session(tmp_path / "session")
        assert said(model, text) == wanted
    for search in ("lookahead", "beam"):
        with load(made[1]) as model:
            assert len(model.generate(text, max_tokens=12, search=search, ignore_eos=True).token_ids) == 12
