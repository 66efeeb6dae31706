"""Speculation gives the text of plain decoding: the same tokens, logits and cache, bit for bit, whoever drafts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.bundle import Bundle, Layout, open_bundle
from edgeinfer.bundle.heads import add_heads
from edgeinfer.config import GenerationConfig
from edgeinfer.export import ExportConfig, export_checkpoint
from edgeinfer.runtime.contracts import Backend, CacheSnapshot, Floats
from edgeinfer.runtime.engine import Engine
from edgeinfer.runtime.onnx_backend import OnnxBackend
from edgeinfer.runtime.reference import ReferenceBackend
from edgeinfer.runtime.sampling import ChoiceConstraint, Sampler, TokenChooser
from edgeinfer.runtime.speculation.acceptance import Acceptance
from edgeinfer.runtime.speculation.governor import Governor
from edgeinfer.runtime.speculation.lawful import ChainsGovernor, LawfulGovernor
from edgeinfer.runtime.speculation.registry import DrafterParts, make_drafter
from edgeinfer.runtime.speculation.rounds import Rounds
from edgeinfer.runtime.speculation.tuning import Tuning
from edgeinfer.runtime.speculation.verification import find_verification
from tests.cache import made
from tests.factories import make_checkpoint
from tests.heads import DRAFTING, random_heads
from tests.kernel import require_kernel
from tests.runtime.speculation.prices import FLAT, Prices

pytestmark = pytest.mark.matrix

# A text that repeats itself, so that tables have something to say.
PROMPT = [40, 51, 62, 73, 84, 95, 40, 51, 62, 73, 84, 95, 40, 51]
TOKENS = 28
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
EXPORTS = {
    "4-bit-128": ExportConfig(4, 128, keep_small=False),
    "8-bit-32": ExportConfig(8, 32, keep_small=False),
    "8-bit-64": ExportConfig(8, 64, keep_small=False),
    "2-bit-128": ExportConfig(2, 128, keep_small=False),
    "float32": ExportConfig(32),
}
DRAFTERS = (
    ("copy",),
    ("ngram",),
    ("recycle",),
    ("model",),
    ("hierarchical",),
    ("exit",),
    ("skip",),
    ("bits",),
    ("medusa",),
    ("hydra",),
    ("prompt",),
    ("copy", "model", "hydra", "prompt"),
    ("copy", "ngram", "recycle", "model", "exit", "bits"),
)
# A random model rambles; among three tokens it repeats itself often enough for tables to draft, and to be wrong.
FEW = dict.fromkeys((40, 51, 62), 50.0)
GREEDY = GenerationConfig(logit_bias=FEW)
SAMPLED = GenerationConfig(temperature=0.8, top_p=0.9, seed=5, logit_bias=FEW)
PENALISED = GenerationConfig(temperature=0.7, repetition_penalty=1.02, frequency_penalty=0.2, seed=6, logit_bias=FEW)


@dataclass
class Witness:
    """A chooser that keeps the logits that each position was last chosen from."""

    inner: TokenChooser
    logits: dict[int, Floats]

    @property
    def takes_likeliest(self) -> bool:
        return False

    @property
    def follows_paths(self) -> bool:
        return True

    def token(self, logits: Floats, position: int, path: Sequence[int] = ()) -> int:
        self.logits[position] = logits.copy()
        return self.inner.token(logits, position, path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclass(frozen=True)
class Text:
    """What decoding gave."""

    tokens: list[int]
    logits: dict[int, Floats]
    cache: CacheSnapshot
    rounds: Rounds | None


def chooser_of(config: GenerationConfig, vocabulary: int, constraint: ChoiceConstraint | None = None) -> TokenChooser:
    return TokenChooser(Sampler(config, vocabulary, config.seed or 0), PROMPT, constraint)


class Subject:
    """A model that decodes plainly or in rounds, with costs under which drafting always pays."""

    def __init__(self, bundle: Bundle, backend: Backend, model: Callable[[], Backend]) -> None:
        self.bundle = bundle
        self.backend = backend
        self.engine = Engine(backend, 8)
        self._model = cache(model)
        self._plain: dict[str, Text] = {}

    def plain(self, config: GenerationConfig) -> Text:
        """What decoding without drafts gives, decoded once."""
        key = repr(config)
        if key not in self._plain:
            self._plain[key] = self.decode(config)
        return self._plain[key]

    def decode(
        self,
        config: GenerationConfig,
        drafters: Sequence[str] = (),
        *,
        width: int = 1,
        constraint: ChoiceConstraint | None = None,
        noise: float = 0.0,
        stop_ids: frozenset[int] = frozenset(),
    ) -> Text:
        self.engine.forget()
        chooser = Witness(chooser_of(config, self.backend.geometry.vocab_size, constraint), {})
        rounds = self.rounds(chooser, config, drafters, width, noise) if drafters else None
        steps = self.engine.generate(PROMPT, chooser, max_tokens=TOKENS, stop_ids=stop_ids, rounds=rounds)
        tokens = [step.token for step in steps]
        return Text(tokens, chooser.logits, self.backend.snapshot(), rounds)

    def rounds(
        self, chooser: Witness, config: GenerationConfig, names: Sequence[str], width: int, noise: float
    ) -> Rounds:
        verification = find_verification(config.verification)
        model = self._model() if {"model", "hierarchical"} & {*names} else None
        if model is not None:
            model.truncate(0)
        parts = DrafterParts(self.backend, model, 8, Tuning(), bundle=self.bundle)
        if "bits" in names and not self.backend.capabilities.elastic:
            names = [name for name in names if name != "bits"]
            if not names:
                pytest.skip("these weights have one plane")
        made = [make_drafter(name, parts) for name in names]
        acceptance = Acceptance()
        for drafter in made:
            acceptance.add(drafter.name, [0.9] * len(drafter.priors))
        kind = Governor
        if verification.stochastic:
            kind = ChainsGovernor if verification.iid_chains else LawfulGovernor
        governor = kind(made, Prices(FLAT, {"model": 0.1, "exit": 0.1, "bits": 0.1}), acceptance, 7, width)
        settled = width > 1 and isinstance(self.backend, OnnxBackend)
        return Rounds(
            self.backend, chooser, made, governor, verification, settled=settled, noise=noise, timed=lambda ms: None
        )


def bundles(export: str, layout: Layout) -> tuple[Bundle, Bundle]:
    """A target with heads, and a smaller drafter with the same tokenizer."""
    target = made(_make_target, export, layout, Path(inspect.getfile(random_heads)))
    return open_bundle(target / "target"), open_bundle(made(_make_drafter) / "drafter")


def _make_target(folder: Path, export: str, layout: Layout, source_of_heads: Path) -> None:
    make_checkpoint(folder / "checkpoint", "qwen2", **SIZES)
    config = replace(EXPORTS[export], layout=layout)
    target = open_bundle(export_checkpoint(folder / "checkpoint", folder / "target", config))
    for kind in DRAFTING:
        target = add_heads(target.path, random_heads(target, kind))


def _make_drafter(folder: Path) -> None:
    make_checkpoint(folder / "checkpoint", "qwen2", **(SIZES | {"num_hidden_layers": 2}))
    export_checkpoint(folder / "checkpoint", folder / "drafter", ExportConfig(32))


LAYOUTS: dict[str, tuple[Layout, ...]] = dict.fromkeys(EXPORTS, ("native", "portable")) | {"float32": ("portable",)}


@pytest.fixture(
    scope="module",
    params=[(e, layout, t) for e in EXPORTS for layout in LAYOUTS[e] for t in (1, 2)],
    ids=lambda p: f"{p[0]}-{p[1]}-threads-{p[2]}",
)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    export, layout, threads = request.param
    if layout == "native":
        require_kernel()
    target, drafter = bundles(export, layout)
    backend = OnnxBackend(target, 64, threads=threads)
    yield Subject(target, backend, lambda: OnnxBackend(drafter, 64, exact=False))
    backend.close()


@pytest.fixture(scope="module")
def reference() -> Subject:
    target, drafter = bundles("8-bit-32", "portable")
    return Subject(target, ReferenceBackend(target, 64), lambda: ReferenceBackend(drafter, 64))


def assert_same(actual: Text, expected: Text) -> None:
    assert actual.tokens == expected.tokens
    for position in range(len(PROMPT), len(PROMPT) + len(expected.tokens)):
        assert np.array_equal(actual.logits[position], expected.logits[position]), f"logits of position {position}"
    assert actual.cache.length == expected.cache.length
    pairs = zip((*actual.cache.keys, *actual.cache.values), (*expected.cache.keys, *expected.cache.values), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("config", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("drafters", DRAFTERS, ids="+".join)
def test_the_text_is_that_of_plain_decoding_bit_for_bit(
    subject: Subject, drafters: tuple[str, ...], config: GenerationConfig
) -> None:
    plain = subject.plain(config)
    drafted = subject.decode(config, drafters)
    assert drafted.rounds is not None
    assert drafted.rounds.tally.drafted > 0
    assert_same(drafted, plain)


@pytest.mark.parametrize("drafters", [("recycle",), ("model",), ("hydra", "prompt")], ids="+".join)
def test_trees_are_exact_where_side_branches_are_not_built_on(subject: Subject, drafters: tuple[str, ...]) -> None:
    plain = subject.plain(SAMPLED)
    drafted = subject.decode(SAMPLED, drafters, width=3)
    assert drafted.rounds is not None
    assert drafted.rounds.tally.drafted > drafted.rounds.tally.rounds
    assert_same(drafted, plain)


@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("config", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize(
    "drafters", [("recycle",), ("model",), ("medusa",), ("copy", "ngram", "recycle")], ids="+".join
)
def test_trees_give_the_text_of_plain_decoding(
    reference: Subject, drafters: tuple[str, ...], config: GenerationConfig, width: int
) -> None:
    plain = reference.plain(config)
    drafted = reference.decode(config, drafters, width=width)
    assert drafted.rounds is not None
    assert drafted.rounds.tally.drafted > drafted.rounds.tally.rounds
    assert drafted.tokens == plain.tokens
    # Cache rows of the accepted branch were moved together; a numpy product of other shapes differs in rounding.
    for actual, expected in zip(drafted.cache.keys, plain.cache.keys, strict=True):
        assert np.allclose(actual, expected, atol=1e-4)


@pytest.mark.parametrize("name", ["rejection", "k-seq", "typical"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_other_verifications_run_and_are_greedy_without_temperature(
    reference: Subject, name: str, temperature: float
) -> None:
    config = replace(GREEDY, temperature=temperature, seed=3, verification=name)
    drafted = reference.decode(config, ("model",), width=2 if name == "k-seq" else 1)
    assert drafted.rounds is not None
    assert drafted.rounds.tally.drafted > 0
    assert len(drafted.tokens) == TOKENS
    if temperature == 0:
        assert drafted.tokens == reference.plain(GREEDY).tokens


def test_a_stop_token_inside_a_round_ends_the_text_there(reference: Subject) -> None:
    plain = reference.plain(GREEDY)
    stop = frozenset({plain.tokens[9]})
    expected = plain.tokens[: plain.tokens.index(plain.tokens[9]) + 1]
    drafted = reference.decode(GREEDY, ("model",), stop_ids=stop)
    assert drafted.tokens == expected
    assert drafted.cache.length == len(PROMPT) + len(expected) - 1


def test_forced_tokens_are_drafted_and_accepted(reference: Subject) -> None:
    choices = [[50, 51, 52, 53, 54, 55, 56, 57], [60, 61, 62, 63, 64, 65, 66, 67]]
    stop = frozenset({1})
    # A constraint is a stack, so each text has its own.
    plain = reference.decode(GREEDY, constraint=ChoiceConstraint(choices, stop), stop_ids=stop)
    drafted = reference.decode(GREEDY, ("forced",), constraint=ChoiceConstraint(choices, stop), stop_ids=stop)
    assert plain.tokens[:-1] in choices
    assert drafted.tokens == plain.tokens
    assert drafted.rounds is not None
    assert drafted.rounds.tally.accepted == drafted.rounds.tally.drafted >= 6


def test_near_ties_are_decided_again_by_a_plain_pass(reference: Subject) -> None:
    plain = reference.plain(GREEDY)
    drafted = reference.decode(GREEDY, ("model",), noise=1e9)
    assert drafted.rounds is not None
    # Steps for which nobody was asked are plain already.
    assert drafted.rounds.tally.rechecked == drafted.rounds.tally.recovered > 5
    assert drafted.tokens == plain.tokens


def test_a_failed_pass_leaves_the_cache_as_it_was(reference: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    reference.engine.forget()
    chooser = Witness(chooser_of(GREEDY, 320), {})
    rounds = reference.rounds(chooser, GREEDY, ("exit",), 1, 0.0)
    steps = reference.engine.generate(PROMPT, chooser, max_tokens=TOKENS, stop_ids=frozenset(), rounds=rounds)
    next(steps)
    whole = reference.backend.forward

    def fails(*args: Any, hidden: Floats | None = None, **options: Any) -> Any:
        if hidden is not None:
            raise RuntimeError("broken")
        return whole(*args, hidden=hidden, **options)

    monkeypatch.setattr(reference.backend, "forward", fails)
    with pytest.raises(RuntimeError, match="broken"):
        next(steps)
    monkeypatch.undo()
    assert reference.backend.length == len(PROMPT)
    assert reference.decode(GREEDY, ("exit",)).tokens == reference.plain(GREEDY).tokens
