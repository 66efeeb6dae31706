"""`edgeinfer.evaluate`: which tokens are read and compared, what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import log_softmax
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

import edgeinfer
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.core.errors import ModelError, UsageError
from edgeinfer.export.options import ExportConfig
from edgeinfer.tools.evaluation import Divergence, Evaluation, compare_predictions, read_predictions
from tests.cache import export_checkpoint
from tests.factories import make_checkpoint
from tests.tables import each_row

TEXTS = ["Once upon a time there was a little dog.", "She said: the cat is not here, is it?"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A 4-bit bundle and the float32 one of the same checkpoint."""
    folder = tmp_path_factory.mktemp("pair")
    make_checkpoint(folder / "checkpoint", "llama")
    small = ExportConfig(bits=4, keep_small=False, calibration="none")
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
        bundle = export_checkpoint(
            file.parent, tmp_path / "bundle", ExportConfig(bits=4, keep_small=False, calibration="none")
        )
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


Logits = NDArray[np.float32]


class Told:
    """Gives a table's logits in blocks, in one buffer that each block overwrites."""

    def __init__(self, table: Logits, blocks: Sequence[int]) -> None:
        self._table, self._blocks = table, blocks

    def logits(self, tokens: Sequence[int]) -> Iterator[Logits]:
        buffer = np.empty((64, self._table.shape[1]), np.float32)
        start = turn = 0
        while start < len(tokens):
            count = min(self._blocks[turn % len(self._blocks)], len(tokens) - start)
            buffer[:] = np.nan
            buffer[:count] = self._table[np.asarray(tokens[start : start + count])]
            yield buffer[:count]
            start, turn = start + count, turn + 1


def tables(vocabulary: int = 40, seed: int = 0) -> tuple[Logits, Logits]:
    generator = np.random.default_rng(seed)
    reference = generator.normal(0, 3, (vocabulary, vocabulary)).astype(np.float32)
    return reference, reference + generator.normal(0, 0.5, reference.shape).astype(np.float32)


def nothing(read: int) -> None:
    """Ignores progress."""


blocks = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@given(ours=blocks, theirs=blocks, lengths=st.lists(st.integers(2, 50), min_size=1, max_size=3))
def test_figures_are_those_of_the_distributions(ours: list[int], theirs: list[int], lengths: list[int]) -> None:
    reference, candidate = tables()
    windows = [np.random.default_rng(n).integers(0, 40, n).tolist() for n in lengths]
    read: list[int] = []
    logprobs, divergence = compare_predictions(
        Told(candidate, ours), Told(reference, theirs), windows, top=5, report=read.append
    )
    assert sum(read) == sum(lengths)
    p, q = (
        np.concatenate([log_softmax(t.astype(np.float64)[w], axis=1) for w in windows]) for t in (reference, candidate)
    )
    np.testing.assert_allclose(divergence.values, (np.exp(p) * (p - q)).sum(axis=1), atol=1e-12)
    np.testing.assert_array_equal(divergence.same, p.argmax(axis=1) == q.argmax(axis=1))
    best = [np.argsort(-each, axis=1)[:, :5] for each in (p, q)]
    shared = [len(set(a) & set(b)) / 5 for a, b in zip(*map(np.ndarray.tolist, best), strict=True)]
    np.testing.assert_allclose(divergence.overlap, shared)
    wanted = np.concatenate(
        [log_softmax(candidate.astype(np.float64)[w], axis=1)[np.arange(len(w) - 1), w[1:]] for w in windows]
    )
    np.testing.assert_allclose(logprobs, wanted, atol=1e-12)
    np.testing.assert_allclose(read_predictions(Told(candidate, ours), windows, nothing), wanted, atol=1e-12)


def test_vocabularies_of_different_sizes_are_refused() -> None:
    with pytest.raises(ModelError, match="40 and 39"):
        compare_predictions(Told(tables(39)[0], [2]), Told(tables(40)[0], [2]), [[1, 2]], top=1, report=nothing)


def test_figures_over_all_tokens() -> None:
    values = np.arange(101.0)
    divergence = Divergence(values, values > 50, values / 100, top=3, reference_perplexity=2.0)
    figures = divergence.to_dict()
    assert (figures["median"], figures["p90"], figures["p95"], figures["p99"], figures["max"]) == (50, 90, 95, 99, 100)
    assert figures["mean"] == 50 and figures["same_top"] == pytest.approx(50 / 101)
    assert figures["standard_error"] == pytest.approx(values.std() / np.sqrt(101))
    evaluation = Evaluation(np.log([0.5, 0.25, 0.125]), 1, divergence)
    assert evaluation.perplexity == pytest.approx(4.0)
    assert evaluation.perplexity_error == pytest.approx(4.0 * np.log([0.5, 0.25, 0.125]).std() / np.sqrt(3))
    data = evaluation.to_dict()
    assert data["divergence"] == figures and data["tokens"] == 3 and data["weight_bytes"] is None
