"""`edgeinfer.evaluate`: which tokens are read and compared, what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

import edgeinfer
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.errors import ModelError, UsageError
from edgeinfer.export.options import ExportConfig
from tests.cache import export_checkpoint
from tests.factories import make_checkpoint
from tests.tables import each_row

TEXTS = ["Once upon a time there was a little dog.", "She said: the cat is not here, is it?"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A 4-bit bundle and the float32 one of the same checkpoint."""
    folder = tmp_path_factory.mktemp("pair")
    make_checkpoint(folder / "checkpoint", "llama")
    small = ExportConfig(bits=4, keep_small=False)
    return (
        export_checkpoint(folder / "checkpoint", folder / "small", small),
        export_checkpoint(folder / "checkpoint", folder / "float", ExportConfig(bits=32)),
    )


@pytest.fixture(scope="module")
def model(pair: tuple[Path, Path]) -> Iterator[edgeinfer.Model]:
    with edgeinfer.load(pair[0], speculation="off", threads=1) as loaded:
        yield loaded


def test_perplexity_is_that_of_all_tokens(pair: tuple[Path, Path], model: edgeinfer.Model) -> None:
    found = edgeinfer.evaluate(pair[0], TEXTS, threads=1)
    logprobs = np.concatenate([model.score(model.tokenize(text)).logprobs for text in TEXTS])
    np.testing.assert_allclose(found.logprobs, logprobs, atol=1e-9)
    assert found.windows == 2 and found.divergence is None
    manifest = open_bundle(pair[0]).manifest
    assert (found.weight_bytes, found.bits_per_weight) == (manifest.weight_bytes, manifest.bits_per_weight)


@pytest.mark.parametrize("adds", [False, True])
def test_windows_begin_as_the_tokenizer_begins_a_text(pair: tuple[Path, Path], tmp_path: Path, adds: bool) -> None:
    bundle, begin = pair[0], [0]
    if adds:
        file = Path(shutil.copytree(pair[0].parent / "checkpoint", tmp_path / "checkpoint")) / "tokenizer.json"
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        tokenizer.save(str(file))
        bundle = export_checkpoint(file.parent, tmp_path / "bundle", ExportConfig(bits=4, keep_small=False))
    with edgeinfer.load(bundle, speculation="off", threads=1) as model:
        assert model.begin_ids == begin and model.prefix_ids == begin * adds
        ids = model.tokenize(TEXTS[0])[adds:]
        found = edgeinfer.evaluate(model, TEXTS[:1], context=6)
        windows = [begin * adds + ids[start : start + 6 - adds] for start in range(0, len(ids), 6 - adds)]
        again = edgeinfer.evaluate(model, windows)
    np.testing.assert_allclose(found.logprobs, again.logprobs, atol=1e-9)
    assert len(found.logprobs) == len(ids) - (0 if adds else len(windows)) and found.windows == len(windows)
    # What is loaded already is not asked for its files.
    assert again.weight_bytes is None


def test_no_more_tokens_than_asked_for(model: edgeinfer.Model) -> None:
    windows = [[0, 5, 6, 7], [0, 8, 9, 10], [0, 5]]
    told: list[tuple[str, int, int]] = []
    found = edgeinfer.evaluate(model, windows, tokens=6, progress=lambda *step: told.append(step))
    assert found.windows == 2 and len(found.logprobs) == 3 + 1
    assert told[-1][1:] == (6, 6)
    # One token alone predicts nothing.
    assert edgeinfer.evaluate(model, windows, tokens=5).windows == 1


def test_quantization_moves_predictions_a_little(pair: tuple[Path, Path]) -> None:
    found = edgeinfer.evaluate(pair[0], TEXTS, reference=pair[1], threads=1)
    plain = edgeinfer.evaluate(pair[1], TEXTS, threads=1)
    assert found.divergence is not None
    assert found.divergence.reference_perplexity == pytest.approx(plain.perplexity)
    assert 0 < found.divergence.mean < 0.5 < found.divergence.agreement <= 1
    assert found.bits_per_weight is not None and found.bits_per_weight < 8 < 32 <= (plain.bits_per_weight or 0)
    same = edgeinfer.evaluate(pair[1], TEXTS, reference=pair[1], threads=1)
    assert same.divergence is not None and same.divergence.mean == 0.0


def test_other_tokens_are_refused(pair: tuple[Path, Path]) -> None:
    with pytest.raises(ModelError, match=r"tokenizers with different .* same tokenizer"):
        edgeinfer.evaluate(pair[0], TEXTS, reference=edgeinfer.hub.resolve(None))


def test_what_cannot_be_read_is_refused(pair: tuple[Path, Path]) -> None:
    class Engine:
        def logits(self, tokens: object) -> Iterator[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
            raise AssertionError

    with pytest.raises(UsageError, match="no text"):
        edgeinfer.evaluate(pair[0], [""])
    with pytest.raises(UsageError, match="token ids"):
        edgeinfer.evaluate(Engine(), TEXTS)


@each_row("wrong", [{"top": 0}, {"tokens": 1}, {"context": 1}])
def test_options_out_of_range_are_refused(pair: tuple[Path, Path], wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="nothing to measure"):
        edgeinfer.evaluate(pair[0], TEXTS, **wrong)
