"""Errors of attention over smaller caches, by the public face."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeinfer import tools
from edgeinfer.errors import UsageError
from edgeinfer.export.options import ExportConfig
from tests.cache import export_checkpoint, made
from tests.factories import make_bigram_bundle, make_checkpoint

STORIES = ["Once upon a time there was a little dog.", "She said: the cat is not here, is it?"]


def make_random(folder: Path) -> None:
    make_checkpoint(folder / "checkpoint", "llama", seed=11)
    export_checkpoint(folder / "checkpoint", folder / "bundle", ExportConfig(4, keep_small=False))


def make_bigrams(folder: Path) -> None:
    make_bigram_bundle(folder / "bundle")


def test_every_type_of_cache_has_an_error_and_wider_ones_a_smaller() -> None:
    errors = {error.kv: error for error in tools.measure_kv(made(make_random) / "bundle", STORIES)}
    assert [*errors] == ["float16", "int8", "int4"]
    assert 0 < errors["float16"].mean < 0.001 < errors["int8"].mean < 0.02 < errors["int4"].mean < 0.1
    assert all(len(error.layers) == 3 and max(error.layers) >= error.mean for error in errors.values())


def test_what_cannot_be_measured() -> None:
    with pytest.raises(UsageError, match="no text"):
        tools.measure_kv(made(make_random) / "bundle", [])
    with pytest.raises(UsageError, match="no smaller KV cache than float32"):
        tools.measure_kv(made(make_bigrams) / "bundle", STORIES)
