"""A small model as drafter: it proposes what it would choose itself, whatever became of its earlier proposals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.writing import seal
from edgeinfer.core.errors import BundleError, ModelError, StorageError
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.decoding.sequence import run_alone
from edgeinfer.runtime.speculation.drafters.contract import Probabilities
from edgeinfer.runtime.speculation.drafters.model import ModelDrafter, check_same_vocabulary
from tests.alone import Alone
from tests.runtime.models import feed
from tests.runtime.speculation.drafters.models import (
    committed,
    context,
    export,
    make_backend,
    pair,
    sampled,
)
from tests.runtime.speculation.drafters.rounds import guesses_of
from tests.tables import each_row

CHUNK = 8
PROMPT = np.random.default_rng(6).integers(0, 320, 20).tolist()


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return export("portable", num_hidden_layers=2)


@pytest.fixture(scope="module")
def backend(bundle: Bundle) -> Alone[Any]:
    return make_backend("portable", bundle)


@pytest.fixture(scope="module")
def oracle(bundle: Bundle) -> Callable[[Sequence[int]], Floats]:
    """The model's logits after a path, from the beginning each time. (V,)"""
    backend = make_backend("portable", bundle)

    def last(path: Sequence[int]) -> Floats:
        backend.cache.trim(0)
        row: Floats = feed(backend, path)[-1]
        return row

    return last


@pytest.fixture
def drafter(backend: Alone[Any]) -> ModelDrafter:
    """With whatever its backend holds from the test before, which it knows nothing of."""
    backend.cache.trim(0)
    return ModelDrafter(*pair(backend), CHUNK)


paths = st.lists(st.integers(0, 2), max_size=4)


@given(
    rounds=st.lists(st.tuples(st.lists(paths, max_size=4), paths, st.integers(0, 2)), max_size=5), begins=st.booleans()
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_it_proposes_what_it_would_choose(
    backend: Alone[Any],
    oracle: Callable[[Sequence[int]], Floats],
    rounds: list[tuple[list[list[int]], list[int], int]],
    begins: bool,
) -> None:
    """Over rounds in which any paths are asked for and anything is committed, and over generations."""
    backend.cache.trim(0)
    drafter, tokens = ModelDrafter(*pair(backend), CHUNK), PROMPT
    for _ in range(1 + begins):
        now = context(tokens)
        drafter.begin(now.tokens)
        for asked, accepted, token in rounds:
            for path in asked:
                best = np.argsort(-oracle([*now.tokens, *path]), kind="stable")
                for width in (1, 3, 2):
                    found = [guess.token for guess in guesses_of(drafter, now, path, width)]
                    assert found == best[:width].tolist()
            now.tokens.extend([*accepted, token])
            drafter.observe(committed(accepted, len(accepted), token))
        tokens = [*PROMPT[:9], *PROMPT]


def test_drawn_guesses_carry_their_probabilities(
    drafter: ModelDrafter, oracle: Callable[[Sequence[int]], Floats]
) -> None:
    now = context(PROMPT, sampled)
    drafter.begin(PROMPT)
    token, probabilities = sampled(oracle([*PROMPT, 4]), [4])
    assert probabilities is not None
    (guess,) = guesses_of(drafter, now, [4], 1)
    assert guess.token == token
    assert guess.probabilities is not None
    np.testing.assert_array_equal(guess.probabilities, probabilities)
    # Siblings are drawn from the same distribution by the context, which has its own mind about replacement.
    siblings = iter([11, 11, None])
    asked: list[Sequence[int]] = []

    def further(probabilities: Probabilities, drafted: Sequence[int], taken: Sequence[int]) -> int | None:
        assert probabilities is guess.probabilities
        assert list(drafted) == [4]
        asked.append([*taken])
        return next(siblings)

    several = guesses_of(drafter, replace(now, further=further), [4], 5)
    assert [g.token for g in several] == [token, 11, 11]
    assert all(g.probabilities is guess.probabilities for g in several)
    assert asked == [[token], [token, 11], [token, 11, 11]]


@each_row("columns", [384, 256])
def test_the_target_may_have_more_columns_or_fewer(
    bundle: Bundle, oracle: Callable[[Sequence[int]], Floats], columns: int
) -> None:
    drafter = ModelDrafter(*pair(make_backend("portable", bundle)), CHUNK, columns)
    tokens, own = [*PROMPT, 383, 5], bundle.manifest.geometry.vocab_size
    seen: list[Floats] = []

    def draw(logits: Floats, drafted: Sequence[int]) -> tuple[int, Probabilities | None]:
        seen.append(logits.copy())
        return sampled(logits, drafted)

    drafter.begin(tokens)
    guess = guesses_of(drafter, context(tokens, draw), [], 1)[0]
    shared = min(columns, own)
    # The target's padding stands for nothing: here it is fed as the drafter's last token.
    np.testing.assert_array_equal(seen[0][:shared], oracle([min(token, own - 1) for token in tokens])[:shared])
    assert guess.probabilities is not None
    assert seen[0].shape == guess.probabilities.shape == (columns,)
    assert not guess.probabilities[own:].any()
    assert all(g.token < shared for g in guesses_of(drafter, context(tokens), [7], columns))


def test_nothing_is_guessed_beyond_its_cache(bundle: Bundle) -> None:
    drafter = ModelDrafter(*pair(make_backend("portable", bundle, 21)), CHUNK)
    drafter.begin(PROMPT)
    assert guesses_of(drafter, context(PROMPT), [5], 1)
    assert not guesses_of(drafter, context(PROMPT), [5, 6], 1)


def test_it_counts_its_backend(bundle: Bundle) -> None:
    backend = make_backend("portable", bundle)
    drafter = ModelDrafter(*pair(backend), CHUNK)
    assert (drafter.name, drafter.uses_target, drafter.draws) == ("model", False, True)
    assert sum(backend.nbytes().values()) <= drafter.nbytes() < sum(backend.nbytes().values()) + 10_000
    assert run_alone(drafter.resume(context(PROMPT), [1])) is None
    assert drafter.state() == {}
    drafter.restore({})
    with pytest.raises(StorageError, match="another drafter"):
        drafter.restore({"table": np.zeros(3)})
    drafter.close()
    feed(backend, [1])  # the backend is not closed with it
    backend.close()


def test_two_drafters_of_one_backend_guess_as_if_each_were_alone(bundle: Bundle) -> None:
    backend = make_backend("portable", bundle)
    alone = ModelDrafter(*pair(make_backend("portable", bundle)), CHUNK)
    one, other = ModelDrafter(*pair(backend), CHUNK), ModelDrafter(*pair(backend), CHUNK)
    for drafter in (one, other, alone):
        drafter.begin(PROMPT)
    for drafted in ([], [4], [4, 5], [7], [], [7, 8]):
        expected = guesses_of(alone, context(PROMPT), drafted, 2)
        alone.begin(PROMPT)
        for drafter in (one, other):
            assert guesses_of(drafter, context(PROMPT), drafted, 2) == expected
            drafter.begin(PROMPT)


def edited(bundle: Bundle, folder: Path, change: Callable[[dict[str, Any]], None]) -> Bundle:
    """A copy of a bundle with another tokenizer."""
    shutil.copytree(bundle.path, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    change(tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    seal(folder, bundle.manifest)
    return open_bundle(folder)


def swap(tokenizer: dict[str, Any]) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "vocabulary": swap,
    "merges": lambda tokenizer: tokenizer["model"]["merges"].reverse(),
    "special tokens": lambda tokenizer: tokenizer["added_tokens"][1].update(content="<end>"),
}


def test_tokenizers_that_differ_are_refused(bundle: Bundle, tmp_path: Path) -> None:
    for what, change in CHANGES.items():
        drafter = edited(bundle, tmp_path / what, change)
        with pytest.raises(ModelError, match=f"different {what}") as caught:
            check_same_vocabulary(bundle, drafter)
            pytest.fail(f"other {what} were taken")
        message = str(caught.value)
        assert str(bundle.path) in message
        assert str(drafter.path) in message
        assert "\n" not in message
        assert "Choose a drafter" in caught.value.hint


def test_how_a_tokenizer_is_written_does_not_matter(bundle: Bundle, tmp_path: Path) -> None:
    def rewrite(tokenizer: dict[str, Any]) -> None:
        tokenizer["model"]["merges"] = [merge.split(" ") for merge in tokenizer["model"]["merges"]]
        tokenizer["model"]["vocab"] = dict(reversed(tokenizer["model"]["vocab"].items()))
        tokenizer["padding"] = {"strategy": "BatchLongest"}

    check_same_vocabulary(bundle, bundle)
    check_same_vocabulary(bundle, edited(bundle, tmp_path / "other", rewrite))


def test_columns_may_be_padded_but_must_hold_every_token(bundle: Bundle) -> None:
    padded = export("portable", num_hidden_layers=1, vocab_size=384)
    narrow = export("portable", num_hidden_layers=1, vocab_size=256)
    check_same_vocabulary(padded, bundle)
    check_same_vocabulary(bundle, padded)
    with pytest.raises(ModelError, match=r"\d+ tokens and 256 logits"):
        check_same_vocabulary(bundle, narrow)


def test_a_damaged_tokenizer_is_an_error_of_the_model(bundle: Bundle, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(bundle.path, folder)
    for tokenizer in ("[]", "{}", '{"model": 3, "added_tokens": [4], "x": 0}', "nonsense"):
        (folder / "tokenizer.json").write_text(tokenizer, "utf-8")
        seal(folder, bundle.manifest)
        with pytest.raises(ModelError):
            check_same_vocabulary(bundle, open_bundle(folder))
            pytest.fail(f"{tokenizer} was taken")
    (folder / "tokenizer.json").unlink()
    seal(folder, bundle.manifest)
    with pytest.raises(BundleError, match=r"no tokenizer\.json"):
        check_same_vocabulary(bundle, open_bundle(folder))
