"""Computing less with a loaded model: makes the strategies of replies, and keeps what was calibrated."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.additions import Heads
from edgeinfer.core.errors import CapabilityError, Setting, StorageError, UsageError
from edgeinfer.core.methods import DeclaredMethod, find_method
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.backends.contract import require
from edgeinfer.runtime.decoding.sequence import Sequence, Strategy
from edgeinfer.runtime.layer_skip.block_costs import BlockCosts, measure_costs
from edgeinfer.runtime.layer_skip.strategy import SmallModel, StrategyArguments
from edgeinfer.runtime.profile.device_profile import DeviceProfile
from edgeinfer.runtime.sampling.sampler import Sampler

T = TypeVar("T")

_log = logging.getLogger("edgeinfer")

_COSTS = "blocks"
# Fewest and most passes of each kind that tell what blocks cost, how long all of a kind may take, and rows in the cache
# behind which they are timed.
_REPEATS, _MEASURED_MS, _PAST = (3, 60), 200.0, 64


@dataclass(frozen=True, kw_only=True)
class ComputeMethod(DeclaredMethod):
    """A way to compute less as its file declares it."""

    make: Callable[[ReducedComputeStrategies, StrategyArguments], Strategy]
    refuses: tuple[str, ...] = ("skip_cache",)  # options of reduced compute that do not go with it
    follows_replies: bool = True  # whether it can read a given reply token by token
    remote: bool = False  # whether the large model can be a server's


def compute_method(name: str) -> ComputeMethod:
    """The declaration of a way to compute less; UsageError where there is none."""
    return cast(ComputeMethod, find_method("compute", name))


class Kept(Protocol):
    """What tuning finds of a method."""

    def state(self) -> dict[str, NDArray[Any]]:
        """The arrays to keep, by name."""


class ReducedComputeStrategies:
    """Makes the strategies of replies that take less compute, one per model. Between replies the cache of `sequence`
    may be emptied. `tuned_exit` gives the exit that tuning found, `plain_ms` what a plain step takes, each None where
    that is not known."""

    def __init__(
        self,
        sequence: Sequence,
        profile: DeviceProfile,
        *,
        small: SmallModel | None,
        parameters: float,
        exits: tuple[int, ...],
        tuned_exit: Callable[[], int | None],
        heads: Callable[[str], Heads | None],
        rows: int,
        plain_ms: Callable[[], float | None],
    ) -> None:
        self.sequence, self.parameters, self.exits = sequence, parameters, exits
        self.tuned_exit, self.heads = tuned_exit, heads
        self._profile, self._small, self._rows, self._plain_ms = profile, small, rows, plain_ms
        self._costs: BlockCosts | None = None
        self._known: dict[str, Any] = {}

    def kept(self, name: str, read: Callable[[dict[str, NDArray[Any]]], T], missing: T) -> T:
        """What tuning kept of a method under a name, read once; `missing` where that is nothing, or damaged."""
        if name not in self._known:
            try:
                self._known[name] = read(self._profile.arrays(name) or {})
            except StorageError as error:
                _log.warning("%s", error)
                self._profile.drop(name)
                self._known[name] = missing
        found: T = self._known[name]
        return found

    def keep(self, name: str, found: Kept) -> None:
        """Use what tuning found of a method, and keep it for later sessions."""
        self._known[name] = found
        self._profile.save_arrays(name, found.state())

    def strategy(self, sequence: Sequence, options: ReplyOptions, sampler: Sampler) -> Strategy:
        """The strategy of a reply that does not compute in full."""
        if sequence.backend.geometry.states:
            message = "This model has recurrent layers, whose state would lack what less compute leaves out."
            raise CapabilityError(message, "Use the full model.")
        given = StrategyArguments(sequence, sampler, options, self._rows, self._plain_ms())
        return compute_method(options.compute).make(self, given)

    def require_small(self) -> SmallModel:
        """The draft model; UsageError where there is none."""
        if self._small is None:
            message = "This method needs a draft model."
            raise UsageError(message, "Name a small model with the same tokenizer with " + Setting("draft_model") + ".")
        return self._small

    def require_skipping(self) -> None:
        """Refuse a backend that cannot skip layers."""
        hint = "Use a natively exported bundle, or the full model."
        require(self.sequence.backend.capabilities.layer_skip, self.sequence.backend, "skip layers", hint)

    def block_costs(self) -> BlockCosts:
        """What blocks cost here, measured where that is not known, which empties the cache."""
        if self._costs is None:
            state, blocks = self._profile.arrays(_COSTS) or {}, 2 * self.sequence.backend.geometry.num_layers
            self._costs = _costs_from(state, blocks) or self._measure()
        return self._costs

    def _measure(self) -> BlockCosts:
        backend, cache = self.sequence.backend, self.sequence.cache
        past = min(_PAST, cache.capacity // 2)
        self.sequence.forget()
        once = measure_costs(backend, cache, longest=1, repeats=1, past=past).whole[0]
        repeats = min(max(int(_MEASURED_MS / max(once, 1e-3)), _REPEATS[0]), _REPEATS[1])
        costs = measure_costs(backend, cache, longest=1, repeats=repeats, past=past)
        arrays = {"fixed": [costs.fixed], "blocks": costs.blocks, "whole": costs.whole}
        self._profile.save_arrays(_COSTS, {name: np.array(values, np.float64) for name, values in arrays.items()})
        return costs


def _costs_from(state: dict[str, NDArray[Any]], blocks: int) -> BlockCosts | None:
    """What was kept of costs; None where that is nothing, or damaged."""
    shapes = {"fixed": (1,), "blocks": (blocks,), "whole": (2,)}
    fits = {name: array.shape for name, array in state.items()} == shapes
    if not fits or not all(np.isfinite(array).all() and (array >= 0).all() for array in state.values()):
        return None
    fixed, each, whole = (state[name].astype(np.float64).tolist() for name in shapes)
    return BlockCosts(fixed[0], tuple(each), tuple(whole)) if whole[0] > 0 else None
