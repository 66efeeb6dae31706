"""Finds out whether a model's own layers draft well enough to pay, and how; knows nothing of where texts come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.profile.layer_drafting import Tuning
from edgeinfer.runtime.speculation.skip_costs import measure_costs
from edgeinfer.runtime.speculation.skip_samples import Sample
from edgeinfer.runtime.speculation.skip_search import SkipSet, best_exit, best_skip_set

__all__ = ["TuneResult", "tune"]

# A prediction that is off by this much must not make decoding slower.
_PAYS = 1.05


@dataclass(frozen=True)
class TuneResult:
    """What was found.

    Attributes:
        exit: the early exit that drafts best.
        skip: the set of skipped blocks that drafts best.
        tuning: of these, what is predicted to pay.
    """

    exit: SkipSet
    skip: SkipSet
    tuning: Tuning


def tune(
    backend: Backend,
    samples: Sequence[Sample],
    *,
    granularity: int = 1,
    evaluations: int = 200,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> TuneResult:
    """Measures costs and searches; empties the cache.

    Args:
        samples: texts of the model's own to score by.
        granularity: consecutive layers that are skipped together, and after which alone a pass may end.
        evaluations: most sets of blocks to score.
        progress: called with sets scored and to score.

    Raises:
        CapabilityError: the backend cannot skip layers.
        UsageError: no samples, a context that is too small, or a model of one layer.
    """
    costs = measure_costs(backend)
    exits = best_exit(backend, samples, costs, granularity=granularity)
    skip = best_skip_set(
        backend, samples, costs, granularity=granularity, evaluations=evaluations, seed=seed, progress=progress
    )
    tuning = Tuning(
        exit_layer=exits.layers if exits.speedup > _PAYS else None,
        layer_mask=skip.layer_mask if skip.speedup > _PAYS and not skip.layer_mask.all() else None,
    )
    return TuneResult(exits, skip, tuning)
