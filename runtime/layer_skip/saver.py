"""Computing less with a loaded model: makes the steps of replies, and keeps what was calibrated; knows no text.

Made once per model, as the `Speculator` is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgeinfer.adaptive import ComputeOptions
from edgeinfer.errors import CapabilityError, StorageError, UsageError
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.decoding.engine import Engine
from edgeinfer.runtime.layer_skip.contract import Chooser
from edgeinfer.runtime.layer_skip.entropy import ENTROPY, Entropies, rolling_means
from edgeinfer.runtime.layer_skip.exiting import Exiting
from edgeinfer.runtime.layer_skip.ladder import LADDER, Ladder, Progress, search_ladder
from edgeinfer.runtime.layer_skip.predictions import entropy_bits
from edgeinfer.runtime.layer_skip.registry import SKIPPING, SWITCHING, PolicyParts
from edgeinfer.runtime.layer_skip.skipping import Skipping
from edgeinfer.runtime.layer_skip.steps import Steps, Surroundings
from edgeinfer.runtime.layer_skip.switching import Switching
from edgeinfer.runtime.profile.profile import Profile
from edgeinfer.runtime.speculation.drafters.model import ModelDrafter
from edgeinfer.runtime.speculation.skip_costs import BlockCosts, measure_costs
from edgeinfer.runtime.speculation.skip_samples import Sample

__all__ = ["Saver", "SaverParts"]

T = TypeVar("T")

_log = logging.getLogger("edgeinfer")

_COSTS = "blocks"
# Fewest and most passes of each kind that tell what blocks cost, how long all of a kind may take, and rows in the cache
# behind which they are timed.
_REPEATS, _MEASURED_MS, _PAST = (3, 60), 200.0, 64


@dataclass(frozen=True)
class SaverParts:
    """What computing less is made of.

    Attributes:
        engine: of the model; between replies its cache may be emptied.
        small: the backend of the draft model; None where there is none.
        parameters: of the draft model over those of the model.
        exits: layers after which the bundle says that an early exit is meaningful.
        exit_layer: tells the exit that tuning found, if any.
        routers: as `PolicyParts`.
        rows: most logit rows of a pass.
        plain_ms: tells what a plain step takes, as far as that is known.
    """

    engine: Engine
    small: Backend | None
    parameters: float
    exits: tuple[int, ...]
    exit_layer: Callable[[], int | None]
    routers: Callable[[], tuple[Floats, Floats] | None]
    rows: int
    plain_ms: Callable[[], float | None]


class Saver:
    """Makes the steps of replies that take less compute.

    Args:
        parts: what they are made of.
        profile: where what was calibrated is kept.
    """

    def __init__(self, parts: SaverParts, profile: Profile) -> None:
        self._parts = parts
        self._profile = profile
        self._costs: BlockCosts | None = None
        backend = parts.engine.backend
        self._ladder = self._kept(LADDER, lambda state: Ladder.from_state(state, backend.geometry.num_layers), None)
        self._entropies = self._kept(ENTROPY, Entropies.from_state, Entropies())
        self._small: ModelDrafter | None = None
        if parts.small is not None:
            self._small = ModelDrafter(parts.small, parts.engine.chunk, backend.geometry.vocab_size)

    def _kept(self, name: str, read: Callable[[dict[str, NDArray[Any]]], T], missing: T) -> T:
        try:
            return read(self._profile.arrays(name) or {})
        except StorageError as error:
            _log.warning("%s", error)
            self._profile.drop(name)
            return missing

    def steps(self, options: ComputeOptions, chooser: Chooser) -> Steps | None:
        """How a reply is decoded; None is in full.

        Raises:
            UsageError: what is asked for needs what is not there.
            CapabilityError: the backend cannot do it.
        """
        if options.compute == "full":
            return None
        parts, engine = self._parts, self._parts.engine
        policies = PolicyParts(self._ladder, parts.routers, self._entropies)
        if options.compute in SWITCHING:
            switch = SWITCHING[options.compute](policies, options)
            return Switching(self._given(options, chooser), self._require_small(), switch, parts.parameters)
        skip = SKIPPING[options.compute](policies, options) if options.compute in SKIPPING else None
        if not engine.backend.capabilities.layer_skip:
            message = f"The {engine.backend.name} backend cannot skip layers."
            raise CapabilityError(message, "Use a natively exported bundle, or compute in full.")
        costs = self._block_costs()
        given = self._given(options, chooser, costs.whole[0])
        if skip is not None:
            return Skipping(given, skip, costs)
        return Exiting(given, self._exit_layer(options), costs)

    def _given(self, options: ComputeOptions, chooser: Chooser, plain_ms: float | None = None) -> Surroundings:
        engine, known = self._parts.engine, self._parts.plain_ms()
        plain = plain_ms if known is None else known
        return Surroundings(engine.backend, chooser, options, engine.chunk, self._parts.rows, plain)

    def _require_small(self) -> ModelDrafter:
        if self._small is None:
            message = "Two models are to take turns, and there is one."
            raise UsageError(message, "Name a small model with the same tokenizer with --draft-model.")
        return self._small

    def _exit_layer(self, options: ComputeOptions) -> int:
        """What is asked for, the bundle's first exit where not every layer is one, what was tuned, or two thirds."""
        layers = self._parts.engine.backend.geometry.num_layers
        trained = self._parts.exits[0] if 1 < len(self._parts.exits) < layers else None
        return options.exit_layer or trained or self._parts.exit_layer() or max(1, layers * 2 // 3)

    def _block_costs(self) -> BlockCosts:
        """What blocks cost here, measured where that is not known, which empties the cache."""
        if self._costs is None:
            state, blocks = self._profile.arrays(_COSTS) or {}, 2 * self._parts.engine.backend.geometry.num_layers
            self._costs = _costs_from(state, blocks) or self._measure()
        return self._costs

    def _measure(self) -> BlockCosts:
        engine = self._parts.engine
        past = min(_PAST, engine.backend.cache.capacity // 2)
        engine.forget()
        once = measure_costs(engine.backend, longest=1, repeats=1, past=past).whole[0]
        repeats = min(max(int(_MEASURED_MS / max(once, 1e-3)), _REPEATS[0]), _REPEATS[1])
        costs = measure_costs(engine.backend, longest=1, repeats=repeats, past=past)
        arrays = {"fixed": [costs.fixed], "blocks": costs.blocks, "whole": costs.whole}
        self._profile.save_arrays(_COSTS, {name: np.array(values, np.float64) for name, values in arrays.items()})
        return costs

    def calibrate_skips(
        self, samples: Sequence[Sample], *, granularity: int, evaluations: int, progress: Progress | None
    ) -> tuple[Ladder, BlockCosts]:
        """Searches the sets of blocks of "calibrated", keeps and uses them; errors as `search_ladder`."""
        costs, engine = self._block_costs(), self._parts.engine
        try:
            self._ladder = search_ladder(
                engine.backend, samples, costs, granularity=granularity, evaluations=evaluations, progress=progress
            )
        finally:
            engine.forget()
        self._profile.save_arrays(LADDER, self._ladder.state())
        return self._ladder, costs

    def calibrate_entropy(self, samples: Sequence[Sample]) -> Entropies:
        """Has the small model read replies of the large one, keeps how unsure it is, and uses that.

        Raises:
            UsageError: there is no small model.
        """
        small, means = self._require_small(), list[float]()
        for sample in samples:
            text: list[int] = [*sample.prompt]
            small.begin(text)
            bits: list[float] = []
            for token in sample.reply:
                logits = small.after(text)
                if logits is None:
                    break
                bits.append(entropy_bits(logits))
                text.append(token)
            means += rolling_means(bits)
        self._entropies = Entropies(means)
        self._profile.save_arrays(ENTROPY, self._entropies.state())
        return self._entropies


def _costs_from(state: dict[str, NDArray[Any]], blocks: int) -> BlockCosts | None:
    """What was kept of costs; None where that is nothing, or damaged."""
    shapes = {"fixed": (1,), "blocks": (blocks,), "whole": (2,)}
    fits = {name: array.shape for name, array in state.items()} == shapes
    if not fits or not all(np.isfinite(array).all() and (array >= 0).all() for array in state.values()):
        return None
    fixed, each, whole = (state[name].astype(np.float64).tolist() for name in shapes)
    return BlockCosts(fixed[0], tuple(each), tuple(whole)) if whole[0] > 0 else None
