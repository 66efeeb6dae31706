"""Which way of decoding a request asks for: a search, less compute, drafting ahead, or one token per pass.

Knows nothing of how any of them works.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from edgeinfer.adaptive import ComputeUse
from edgeinfer.config import GenerationConfig
from edgeinfer.runtime.decoding.engine import Multistep
from edgeinfer.runtime.sampling import TokenChooser
from edgeinfer.runtime.search.contract import Search, SearchParts
from edgeinfer.runtime.search.registry import make_search
from edgeinfer.runtime.speculation.rounds import Rounds

if TYPE_CHECKING:
    from edgeinfer.model_parts import ModelParts

__all__ = ["Decoding", "LessCompute", "make_decoding"]


class LessCompute(Multistep, Protocol):
    """Decodes with less than the whole model."""

    def use(self) -> ComputeUse:
        """What it did so far."""


@dataclass(frozen=True)
class Decoding:
    """How one reply is decoded; at most one of these is there, and none is one token per pass."""

    rounds: Rounds | None = None
    compute: LessCompute | None = None
    search: Search | None = None

    @property
    def steps(self) -> Multistep | None:
        """The one that is there."""
        return self.rounds or self.compute or self.search

    def finish(self) -> None:
        """The reply is over."""
        if self.rounds is not None:
            self.rounds.finish()


def make_decoding(
    parts: ModelParts, chooser: TokenChooser, config: GenerationConfig, stop_ids: frozenset[int], *, continues: bool
) -> Decoding:
    """The way that a reply is decoded.

    Args:
        chooser: of the reply's tokens.
        stop_ids: that end it.
        continues: the reply goes on with the prompt's text.

    Raises:
        UsageError: what is asked for needs what is not there, or excludes something else that is asked for.
        CapabilityError: the backend cannot do it.
    """
    if config.search != "off":
        return Decoding(search=_search(parts, chooser, config, stop_ids, continues))
    steps = parts.reduced.steps(config, chooser)
    if steps is not None:
        return Decoding(compute=steps)
    return Decoding(rounds=parts.speculator.rounds(chooser, config))


def _search(
    parts: ModelParts, chooser: TokenChooser, config: GenerationConfig, stop_ids: frozenset[int], continues: bool
) -> Search:
    engine = parts.engine
    made = SearchParts(
        engine.backend, chooser, config, stop_ids, parts.tokenizer, lambda: engine.cancelled, continues=continues
    )
    return make_search(made, forgets=engine.overflow is not None)
