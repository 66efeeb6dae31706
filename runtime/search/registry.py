"""Searches by name, and the options that each goes together with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from edgeinfer.config import GenerationConfig
from edgeinfer.errors import CapabilityError, Setting, UsageError
from edgeinfer.records import dataclass
from edgeinfer.runtime.backends.forks import can_fork
from edgeinfer.runtime.search.aligned import Aligned
from edgeinfer.runtime.search.anchored import Anchored
from edgeinfer.runtime.search.astar import AStar
from edgeinfer.runtime.search.beam import Beam
from edgeinfer.runtime.search.cautious import Cautious
from edgeinfer.runtime.search.contrast import Contrast
from edgeinfer.runtime.search.drawn import BestOf, FirstFinish, Vote
from edgeinfer.runtime.search.extract import Extract
from edgeinfer.runtime.search.lookahead import Lookahead
from edgeinfer.runtime.search.momentum import Momentum
from edgeinfer.runtime.search.particles import Particles
from edgeinfer.runtime.search.samples import ParallelSamples
from edgeinfer.runtime.search.strategy import SearchParts, SearchStrategy


@dataclass(frozen=True)
class SearchKind:
    """Tells how a search is made and what it goes together with.

    Attributes:
        draws: "always" where it is of no use without sampling, "never" where it chooses by rules of its own, which
            leave no place for the options of sampling, else "either".
        branches: whether it looks at several continuations.
        rereads: whether it reads the text again, of which the cache then has to hold every row.
        constrained: whether it follows a grammar or a list of choices.
        checked: whether it follows a checker.
        thinks: whether a limit on thoughts holds in all that it looks at.
    """

    make: Callable[[SearchParts], SearchStrategy]
    draws: Literal["always", "never", "either"]
    branches: bool = True
    rereads: bool = False
    constrained: bool = False
    checked: bool = False
    thinks: bool = False


def _anchored(parts: SearchParts) -> Anchored:
    assert parts.anchor is not None, "whoever takes replies gives one, or says why not"
    return Anchored(parts, parts.anchor())


SEARCH_KINDS: Mapping[str, SearchKind] = {
    "samples": SearchKind(ParallelSamples, "always", thinks=True),
    "first-finish": SearchKind(FirstFinish, "always", thinks=True),
    "best-of": SearchKind(BestOf, "always", thinks=True),
    "vote": SearchKind(Vote, "always", thinks=True),
    "cautious": SearchKind(Cautious, "always", constrained=True, thinks=True),
    "lookahead": SearchKind(Lookahead, "never"),
    "contrast": SearchKind(Contrast, "either", constrained=True, thinks=True),
    "momentum": SearchKind(Momentum, "never", branches=False),
    "extract": SearchKind(Extract, "never"),
    "aligned": SearchKind(Aligned, "always", constrained=True),
    "particles": SearchKind(Particles, "always", constrained=True, checked=True, thinks=True),
    "astar": SearchKind(AStar, "always", constrained=True, thinks=True),
    "beam": SearchKind(Beam, "never", constrained=True),
    "anchored": SearchKind(_anchored, "always", branches=False, rereads=True, constrained=True, thinks=True),
}


def make_search(parts: SearchParts, *, forgets: bool) -> SearchStrategy:
    """Makes the search that the options ask for."""
    name = parts.config.search
    kind = SEARCH_KINDS[name]
    _check_sampling(name, kind, parts.config)
    if parts.config.thinking_budget is not None:
        if not kind.thinks:
            message = f"search={name!r} cannot limit thoughts."
            raise UsageError(message, "Leave out " + Setting("thinking_budget") + ", or search in another way.")
    elif parts.sampler.constrained and not kind.constrained:
        others = ", ".join(other for other, k in SEARCH_KINDS.items() if k.constrained)
        message = f"search={name!r} cannot follow a grammar, schema or list of choices."
        raise UsageError(message, f"Leave that out, or search by one of {others}.")
    if parts.sampler.checked and not kind.checked:
        raise UsageError(f"search={name!r} cannot follow a checker.", "Leave one of them out, or use 'particles'.")
    if (kind.branches or kind.rereads) and forgets:
        message = f"search={name!r} needs a context that forgets nothing."
        raise UsageError(message, "Load the model with " + Setting("overflow", "stop") + ".")
    if kind.branches and not can_fork(parts.backend):
        message = f"The {parts.backend.name} backend cannot copy what search={name!r} goes on from in several ways."
        raise CapabilityError(message, "Export the checkpoint to ONNX, or use search='momentum'.")
    return kind.make(parts)


def _check_sampling(name: str, kind: SearchKind, config: GenerationConfig) -> None:
    if kind.draws == "always" and config.greedy:
        message = f"search={name!r} draws tokens at random, which needs sampling."
        raise UsageError(
            message,
            "Set "
            + Setting("temperature", 0.7)
            + " or another value above 0, and leave out "
            + Setting("top_k", 1)
            + ".",
        )
    plain = GenerationConfig()
    options = ("temperature", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias")
    asked = [option for option in options if getattr(config, option) != getattr(plain, option)]
    asked = ["logit_bias (or steering)" if option == "logit_bias" else option for option in asked]
    if kind.draws == "never" and asked:
        message = f"search={name!r} chooses tokens by a rule of its own, without {' and '.join(asked)}."
        raise UsageError(message, "Leave that out.")
