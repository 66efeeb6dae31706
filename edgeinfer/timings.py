"""What the steps of a reply took, as figures of its result."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.results import Timings

__all__ = ["timings_of"]


def timings_of(step_ms: Sequence[float], load_ms: float, prompt_ms: float, cached: int) -> Timings:
    """The figures.

    Args:
        step_ms: of each token, the first one's from the request on.
        load_ms: of the model.
        prompt_ms: of taking in the prompt.
        cached: tokens of the prompt that were not evaluated again.
    """
    later = np.array(step_ms[1:])
    mean = float(later.mean()) if len(later) else 0.0
    p50, p95 = (float(p) for p in np.percentile(later, (50, 95))) if len(later) else (0.0, 0.0)
    return Timings(
        load_ms=load_ms,
        prompt_ms=prompt_ms,
        ttft_ms=step_ms[0] if step_ms else 0.0,
        per_token_ms=mean,
        per_token_p50_ms=p50,
        per_token_p95_ms=p95,
        tokens_per_second=1e3 / mean if mean else 0.0,
        cached_prompt_tokens=cached,
    )
