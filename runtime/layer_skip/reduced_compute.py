"""Computing less with a loaded model: makes the strategies of replies, and keeps what was calibrated."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgeinfer.adaptive import ComputeOptions
from edgeinfer.config import GenerationConfig
from edgeinfer.errors import CapabilityError, Setting, StorageError, UsageError
from edgeinfer.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.decoding.engine import Engine
from edgeinfer.runtime.decoding.strategy import DecodingStrategy
from edgeinfer.runtime.layer_skip.block_costs import BlockCosts, measure_costs
from edgeinfer.runtime.layer_skip.contract import SmallModel
from edgeinfer.runtime.layer_skip.entropy import ENTROPY, Entropies
from edgeinfer.runtime.layer_skip.exiting import EarlyExitDecoding
from edgeinfer.runtime.layer_skip.policies import SKIP_LEVELS, SKIPPING, SWITCHING, PolicyParts, SkipLevels
from edgeinfer.runtime.layer_skip.skipping import LayerSkipDecoding
from edgeinfer.runtime.layer_skip.steps import StepRoutingDecoding
from edgeinfer.runtime.layer_skip.strategy import StrategyArguments
from edgeinfer.runtime.layer_skip.switching import ModelSwitchDecoding
from edgeinfer.runtime.profile.device_profile import DeviceProfile
from edgeinfer.runtime.sampling.sampler import Sampler

T = TypeVar("T")

_log = logging.getLogger("edgeinfer")

_COSTS = "blocks"
# Fewest and most passes of each kind that tell what blocks cost, how long all of a kind may take, and rows in the cache
# behind which they are timed.
_REPEATS, _MEASURED_MS, _PAST = (3, 60), 200.0, 64


@dataclass(frozen=True)
class ReducedComputeParts:
    """What computing less is made of.

    Attributes:
        engine: of the model; between replies its cache may be emptied.
        small: the draft model; None where there is none.
        parameters: of the draft model over those of the model.
        exits: layers after which the bundle says that an early exit is meaningful.
        exit_layer: tells the exit that tuning found, if any.
        routers: as `PolicyParts`.
        rows: most logit rows of a pass.
        plain_ms: tells what a plain step takes, as far as that is known.
    """

    engine: Engine
    small: SmallModel | None
    parameters: float
    exits: tuple[int, ...]
    exit_layer: Callable[[], int | None]
    routers: Callable[[], tuple[Floats, Floats] | None]
    rows: int
    plain_ms: Callable[[], float | None]


class ReducedComputeStrategies:
    """Makes the strategies of replies that take less compute. There is one of it per model.

    Args:
        parts: what strategies are made of.
        profile: where what was calibrated is kept.

    Attributes:
        engine: of the model.
    """

    def __init__(self, parts: ReducedComputeParts, profile: DeviceProfile) -> None:
        self.engine = parts.engine
        self._parts = parts
        self._profile = profile
        self._costs: BlockCosts | None = None
        backend = parts.engine.backend
        self._levels = self._kept(
            SKIP_LEVELS, lambda state: SkipLevels.from_state(state, backend.geometry.num_layers), None
        )
        self._entropies = self._kept(ENTROPY, Entropies.from_state, Entropies())

    def _kept(self, name: str, read: Callable[[dict[str, NDArray[Any]]], T], missing: T) -> T:
        try:
            return read(self._profile.arrays(name) or {})
        except StorageError as error:
            _log.warning("%s", error)
            self._profile.drop(name)
            return missing

    def strategy(
        self, options: GenerationConfig, sampler: Sampler, ends: Callable[[int], bool] | None = None
    ) -> DecodingStrategy | None:
        """How a reply is decoded; None is in full.

        Args:
            ends: whether a token ends a step, where steps are routed.
        """
        if options.compute == "full":
            return None
        parts, engine = self._parts, self.engine
        if engine.backend.geometry.states:
            message = "This model has recurrent layers, whose state would lack what less compute leaves out."
            raise CapabilityError(message, "Use the full model.")
        policies = PolicyParts(self._levels, parts.routers, self._entropies)
        if options.compute in SWITCHING:
            switch = SWITCHING[options.compute](policies, options)
            return ModelSwitchDecoding(self._given(options, sampler), self.require_small(), switch, parts.parameters)
        if options.compute == "steps":
            assert ends is not None, "what writes replies knows where steps end"
            given = self._given(options, sampler)
            return StepRoutingDecoding(given, self.require_small(), ends, parts.parameters)
        skip = SKIPPING[options.compute](policies, options) if options.compute in SKIPPING else None
        if not engine.backend.capabilities.layer_skip:
            message = f"The {engine.backend.name} backend cannot skip layers."
            raise CapabilityError(message, "Use a natively exported bundle, or the full model.")
        costs = self.block_costs()
        given = self._given(options, sampler, costs.whole[0])
        if skip is not None:
            return LayerSkipDecoding(given, skip, costs)
        return EarlyExitDecoding(given, self._exit_layer(options), costs)

    def _given(self, options: ComputeOptions, sampler: Sampler, plain_ms: float | None = None) -> StrategyArguments:
        engine, known = self.engine, self._parts.plain_ms()
        plain = plain_ms if known is None else known
        return StrategyArguments(engine.backend, sampler, options, engine.chunk, self._parts.rows, plain)

    def require_small(self) -> SmallModel:
        """The draft model; UsageError where there is none."""
        if self._parts.small is None:
            message = "This method needs a draft model."
            raise UsageError(message, "Name a small model with the same tokenizer with " + Setting("draft_model") + ".")
        return self._parts.small

    def _exit_layer(self, options: ComputeOptions) -> int:
        """What is asked for, the bundle's first exit where not every layer is one, what was tuned, or two thirds."""
        layers = self.engine.backend.geometry.num_layers
        trained = self._parts.exits[0] if 1 < len(self._parts.exits) < layers else None
        return options.exit_layer or trained or self._parts.exit_layer() or max(1, layers * 2 // 3)

    def block_costs(self) -> BlockCosts:
        """What blocks cost here, measured where that is not known, which empties the cache."""
        if self._costs is None:
            state, blocks = self._profile.arrays(_COSTS) or {}, 2 * self.engine.backend.geometry.num_layers
            self._costs = _costs_from(state, blocks) or self._measure()
        return self._costs

    def _measure(self) -> BlockCosts:
        engine = self.engine
        past = min(_PAST, engine.backend.cache.capacity // 2)
        engine.forget()
        once = measure_costs(engine.backend, longest=1, repeats=1, past=past).whole[0]
        repeats = min(max(int(_MEASURED_MS / max(once, 1e-3)), _REPEATS[0]), _REPEATS[1])
        costs = measure_costs(engine.backend, longest=1, repeats=repeats, past=past)
        arrays = {"fixed": [costs.fixed], "blocks": costs.blocks, "whole": costs.whole}
        self._profile.save_arrays(_COSTS, {name: np.array(values, np.float64) for name, values in arrays.items()})
        return costs

    def keep_levels(self, levels: SkipLevels) -> None:
        """Uses the sets of blocks of "calibrated" that a search found, and keeps them for later sessions."""
        self._levels = levels
        self._profile.save_arrays(SKIP_LEVELS, levels.state())

    def keep_entropies(self, entropies: Entropies) -> None:
        """Uses what was found of how unsure the small model is, and keeps it for later sessions."""
        self._entropies = entropies
        self._profile.save_arrays(ENTROPY, entropies.state())


def _costs_from(state: dict[str, NDArray[Any]], blocks: int) -> BlockCosts | None:
    """What was kept of costs; None where that is nothing, or damaged."""
    shapes = {"fixed": (1,), "blocks": (blocks,), "whole": (2,)}
    fits = {name: array.shape for name, array in state.items()} == shapes
    if not fits or not all(np.isfinite(array).all() and (array >= 0).all() for array in state.values()):
        return None
    fixed, each, whole = (state[name].astype(np.float64).tolist() for name in shapes)
    return BlockCosts(fixed[0], tuple(each), tuple(whole)) if whole[0] > 0 else None
