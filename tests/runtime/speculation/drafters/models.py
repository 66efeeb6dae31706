"""Small models for the tests of drafters that run one, and decoding by hand: plainly, and in rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgeinfer.bundle.layouts import NATIVE, PORTABLE
from edgeinfer.bundle.store import Bundle
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.cache import CacheSnapshot
from edgeinfer.runtime.backends.contract import Backend, KVCache
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.decoding.sequence import run_alone
from edgeinfer.runtime.speculation.drafters.contract import (
    Draft,
    DraftContext,
    Drafter,
    Draw,
    Guess,
    Probabilities,
    Round,
    Verdict,
)
from tests.alone import Alone
from tests.kernel import require_kernel
from tests.runtime.models import bundle_of, feed, make_graph_backend
from tests.runtime.speculation.drafters.rounds import guesses_of

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "max_position_embeddings": 640,
}
EXPORTS = {
    "reference": ExportConfig(8, 32, keep_small=False),
    "portable": ExportConfig(4, 128, layout=PORTABLE, calibration="none"),
    "native": ExportConfig(8, 32, keep_small=False, layout=NATIVE),
}
BACKENDS = tuple(EXPORTS)


def export(kind: str, arch: str = "qwen2", **settings: Any) -> Bundle:
    """A random model for one of BACKENDS, which is everybody's: who changes it makes a copy."""
    return bundle_of(arch, EXPORTS[kind], **(SIZES | settings))


def make_backend(kind: str, bundle: Bundle, capacity: int = 64) -> Alone[Any]:
    """One of BACKENDS; skips the test where it cannot run."""
    if kind == "reference":
        return Alone(ReferenceBackend(bundle, capacity), capacity)
    if kind == "native":
        require_kernel()
    return make_graph_backend(bundle, capacity)


def greedy(logits: Floats, drafted: Sequence[int]) -> tuple[int, Probabilities | None]:
    """The most likely token."""
    return int(logits.argmax()), None


def sampled(logits: Floats, drafted: Sequence[int]) -> tuple[int, Probabilities | None]:
    """A token drawn from the logits' distribution, the same one whenever this place is drawn again."""
    probabilities = np.exp(logits.astype(np.float64) - logits.max())
    probabilities /= probabilities.sum()
    return int(np.random.default_rng([7, *drafted]).choice(len(probabilities), p=probabilities)), probabilities


def pair(backend: Alone[Any]) -> tuple[Backend, KVCache]:
    """What drafters run on."""
    return backend.model, backend.cache


def context(tokens: Sequence[int], draw: Draw = greedy) -> DraftContext:
    """After these tokens, with a grammar that leaves everything open."""
    return DraftContext([*tokens], draw, lambda drafted: ())


@dataclass(frozen=True)
class Plain:
    """A text by plain greedy decoding, and the cache it leaves, which lacks the last token."""

    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    cache: CacheSnapshot

    @classmethod
    def decode(cls, backend: Alone[Any], prompt: Sequence[int], count: int) -> Plain:
        """Decode token by token from an empty cache."""
        backend.cache.trim(0)
        token = int(feed(backend, prompt)[-1].argmax())
        reply = [token]
        while len(reply) < count:
            token = int(feed(backend, [token])[0].argmax())
            reply.append(token)
        return cls(tuple(prompt), tuple(reply), backend.cache.snapshot())


def speculate(backend: Alone[Any], drafter: Drafter, plain: Plain, seed: int) -> list[int]:
    """Decode the text in rounds of up to four drafted tokens, some of them right ones that came from elsewhere.

    As the engine does: drafts, resumes or cuts, verifies, cuts, commits, tells.
    """
    rng = np.random.default_rng(seed)
    backend.cache.trim(0)
    feed(backend, plain.prompt[:-1])
    now, text = context(plain.prompt), [*plain.prompt, *plain.reply]
    drafter.begin(now.tokens)
    while len(now.tokens) < len(text):
        base, known = backend.cache.length, len(now.tokens)
        assert base == known - 1
        drafted: list[int] = []
        length = min(int(rng.integers(5)), len(text) - known - 1)
        while len(drafted) < length:
            (guess,) = guesses_of(drafter, now, drafted, 1)
            drafted.append(text[known + len(drafted)] if rng.random() < 0.6 else guess.token)
        resumption = run_alone(drafter.resume(now, drafted)) if drafted else None
        if resumption is None:
            backend.cache.trim(base)
        assert backend.cache.length == base
        how = {} if resumption is None else {"layer_mask": resumption.layer_mask, "hidden": resumption.hidden}
        fed = [now.tokens[-1], *drafted]
        chosen = feed(backend, fed, **how).argmax(axis=1).tolist()
        right = 0
        while right < len(drafted) and drafted[right] == chosen[right]:
            right += 1
        backend.cache.trim(base + 1 + right)
        now.tokens.extend(chosen[: right + 1])
        drafter.observe(committed(drafted, right, chosen[right]))
    return now.tokens[len(plain.prompt) :]


def committed(drafted: Sequence[int], right: int, token: int) -> Round:
    """What a pass settled that found so many drafted tokens right."""
    guesses = tuple(Guess(token, 0) for token in drafted)
    draft = Draft(guesses, tuple(range(-1, len(drafted) - 1)), ("any",) * len(drafted))
    verdict = Verdict(tuple(range(right)), token, right == len(drafted))
    return Round(draft, verdict, (*drafted[:right], token), np.zeros(1, np.int64), np.zeros((1, 1), np.float32))


def assert_same_cache(kind: str, actual: CacheSnapshot, expected: CacheSnapshot) -> None:
    """Equal bits; of the reference, whose sums depend on how many rows a pass has, a part in ten thousand."""
    assert actual.length == expected.length
    pairs = zip((*actual.keys, *actual.values), (*expected.keys, *expected.values), strict=True)
    tolerance = 1e-4 if kind == "reference" else 0.0
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
