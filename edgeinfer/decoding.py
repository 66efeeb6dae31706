"""Which decoding strategy a request asks for: a search, less compute, drafting ahead, or one token per pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgeinfer.config import GenerationConfig
from edgeinfer.runtime.decoding.strategy import DecodingStrategy
from edgeinfer.runtime.sampling import Sampler
from edgeinfer.runtime.search.registry import make_search
from edgeinfer.runtime.search.strategy import SearchParts

if TYPE_CHECKING:
    from edgeinfer.model_parts import ModelParts

__all__ = ["make_strategy"]


def make_strategy(
    parts: ModelParts, sampler: Sampler, config: GenerationConfig, stop_ids: frozenset[int], *, continues: bool
) -> DecodingStrategy:
    """The strategy that decodes a reply.

    Args:
        sampler: of the reply's tokens.
        stop_ids: that end it.
        continues: the reply goes on with the prompt's text.

    Raises:
        UsageError: what is asked for needs what is not there, or excludes something else that is asked for.
        CapabilityError: the backend cannot do it.
    """
    engine = parts.engine
    if config.search != "off":
        given = SearchParts(
            engine.backend, sampler, config, stop_ids, parts.tokenizer, lambda: engine.cancelled, continues=continues
        )
        return make_search(given, forgets=engine.overflow is not None)
    reduced = parts.reduced.strategy(config, sampler)
    return parts.speculator.strategy(sampler, config) if reduced is None else reduced
