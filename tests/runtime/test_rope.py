"""Rotary tables against transformers' own, and LongRoPE, whose factors follow the length of the text as theirs do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from edgeinfer.nn.arithmetic import rope_tables
from tests.tables import each_row

if TYPE_CHECKING:
    from tests.runtime.conftest import Family
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import edgeinfer

if TYPE_CHECKING:
    from tests.runtime.conftest import Family

# Both sides take cosines of angles of up to 100 radians, whose float32 spacing is 8e-6.
TOLERANCE = 1e-5


@each_row(
    ("name", "rows"),
    [
        *((f"llama{kind}", 100) for kind in ("", "-linear-rope", "-llama3-rope", "-head-dim")),
        *((name, 100) for name in ("phi3", "phi3-partial-rotary")),
        # On both sides of the original context.
        *(("phi3-longrope", rows) for rows in (1, 31, 32, 33, 100)),
    ],
)
def test_tables_match_transformers(make_family: Callable[..., Family], name: str, rows: int) -> None:
    family = make_family(name)
    assert family.bundle.manifest.decoder is not None
    ours = rope_tables(family.bundle.manifest.decoder.rope, rows, rows)
    with torch.no_grad():
        theirs = family.model.model.rotary_emb(torch.zeros(1, rows, 1), torch.arange(rows)[None])
    for mine, whole in zip(ours, theirs, strict=True):
        half = whole[0, :, : whole.shape[-1] // 2].numpy()
        assert mine.shape == half.shape and mine.dtype == np.float32
        assert np.abs(mine - half).max() <= TOLERANCE


BORDER, CONTEXT, REPLY = 32, 96, 24
TEXT = np.random.default_rng(0).integers(2, 320, 60).tolist()


@pytest.fixture(scope="module")
def made(make_family: Callable[..., Family]) -> Family:
    return make_family("phi3-longrope", eos_token_id=None)


def load(bundle: Path, **options: Any) -> Any:
    return edgeinfer.load(bundle, context=CONTEXT, **({"speculation": "off"} | options))


def said(model: edgeinfer.Model, prompt: list[int], **options: Any) -> list[int]:
    reply = model.generate(prompt, max_tokens=REPLY, temperature=0, ignore_eos=True, **options)
    return list(reply.token_ids)


def theirs(made: Family, prompt: list[int]) -> list[int]:
    """Greedy text of transformers, which evaluates a text again where it grows past the border."""
    tokens = list(prompt)
    for _ in range(REPLY):
        tokens.append(int(made.expected(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module", params=["onnx", "reference"])
def loaded(request: pytest.FixtureRequest, made: Family) -> Iterator[edgeinfer.Model]:
    with load(made.bundle.path, backend=request.param) as model:
        yield model


@pytest.mark.every_case
@pytest.mark.parametrize("size", [6, 20, 31, 32, 33, 50])
def test_replies_equal_transformers(made: Family, loaded: edgeinfer.Model, size: int) -> None:
    assert said(loaded, TEXT[:size]) == theirs(made, TEXT[:size])


def test_logits_of_a_text_are_by_its_length(made: Family, loaded: edgeinfer.Model) -> None:
    for size in (BORDER, BORDER + 1, 12):
        logits = np.concatenate([rows.copy() for rows in loaded.logits(TEXT[:size])])
        assert np.abs(logits - made.expected(TEXT[:size])).max() <= 1e-4


def test_drafts_other_conversations_and_sessions_change_nothing(made: Family, tmp_path: Path) -> None:
    # A text that repeats itself, so that drafts are made and accepted on both sides of the border.
    text = (TEXT[:5] * 6)[:26]
    with load(made.bundle.path, cache={"prefix_cache": "1MB"}, prefill_chunk=16) as plain:
        wanted, other = said(plain, text), said(plain, TEXT[:40])
    with load(made.bundle.path, speculation="ngram", cache={"prefix_cache": "1MB"}) as model:
        for _ in range(2):
            assert said(model, text) == wanted
            assert said(model, TEXT[:40]) == other
        said(model, text)
        model.save_session(tmp_path / "session")
        model.load_session(tmp_path / "session")
        assert said(model, text) == wanted
    with load(made.bundle.path) as model:
        assert len(model.generate(text, max_tokens=12, search="beam", ignore_eos=True).token_ids) == 12
