"""Decoding with less than the whole model: what may be asked for, and what it did; knows nothing of models.

All of it is lossy, and results say so.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.errors import UsageError
from edgeinfer.option_checks import Range, require_ranges

__all__ = ["BASELINES", "COMPUTES", "COMPUTE_RANGES", "SKIP_CACHES", "ComputeOptions", "ComputeUse"]

# Ways of computing less, as options name them; runtime/layer_skip has them, a test holds the two equal.
COMPUTES = ("full", "entropy", "unified", "calibrated", "importance", "routers", "exit")
# What ways are compared with, for benchmarks: taken by options, offered to nobody.
BASELINES = ("random",)
# What fills the cache where layers were skipped and are needed after all.
SKIP_CACHES = ("exact", "below")
# Faster than a thousand times, or sure of more bits than a vocabulary has, is what nobody means.
COMPUTE_RANGES = {
    "compute_speedup": Range(1, 1000),
    "compute_share": Range(0, 1),
    "entropy_threshold": Range(0, 64, optional=True),
    "entropy_stay": Range(1, 1024, whole=True),
    "exit_layer": Range(1, 2048, whole=True, optional=True),
    "exit_confidence": Range(0, 1),
    "quality_floor": Range(0, 1000, optional=True),
}


@dataclass(frozen=True)
class ComputeOptions:
    """How much of the model each token takes.

    Attributes:
        compute: one of COMPUTES; all but "full" are lossy. "entropy" has a draft model write where the text is easy to
            foresee; "unified", "calibrated", "importance" and "routers" skip layers or blocks for the whole reply, all
            but the first chosen by `edgeinfer tune --skip`, by the prompt, or by routers of the bundle; "exit" leaves a
            pass early where the first layers are sure of the token. Prompts are always taken in by the whole model.
        compute_speedup: of the skipped sets: how many times faster a pass is to be.
        compute_share: of "entropy": the share of tokens that the large model is to make.
        entropy_threshold: bits above which it makes them; None finds what gives `compute_share`.
        entropy_stay: tokens that a model makes at least before the other one takes over.
        exit_layer: layers after which a pass may be left; None is the bundle's own exit, or what tuning found.
        exit_confidence: probability of the likeliest token from which on the first layers are believed.
        skip_cache: one of SKIP_CACHES, of "exit": deeper layers run later for the tokens that they missed, or these
            take keys and values of the layer below.
        quality_floor: nats by which the reply's predictions may diverge from the whole model's, mean over its tokens;
            where sampled passes of the whole model say that they do, nothing more is left out of the reply. None does
            not look.
    """

    compute: str = "full"
    compute_speedup: float = 1.5
    compute_share: float = 0.5
    entropy_threshold: float | None = None
    entropy_stay: int = 4
    exit_layer: int | None = None
    exit_confidence: float = 0.9
    skip_cache: str = "exact"
    quality_floor: float | None = None

    def check_compute(self) -> None:
        """Refuses values of another type or out of range.

        Raises:
            UsageError: one is.
        """
        if self.compute not in (*COMPUTES, *BASELINES):
            raise UsageError(f"Unknown way to compute {self.compute!r}.", f"Choose one of {', '.join(COMPUTES)}.")
        if self.skip_cache not in SKIP_CACHES:
            raise UsageError(f"Unknown skip_cache {self.skip_cache!r}.", f"Choose one of {', '.join(SKIP_CACHES)}.")
        if self.skip_cache == "below" and self.compute != "exit":
            message = "skip_cache='below' fills what early exits leave out."
            raise UsageError(message, "Use it with compute='exit', or leave it out.")
        if self.skip_cache == "below" and self.quality_floor is not None:
            message = "A quality floor compares with the whole model's cache."
            raise UsageError(message, "Leave skip_cache or quality_floor out.")
        require_ranges(self, COMPUTE_RANGES)


@dataclass(frozen=True)
class ComputeUse:
    """What computing less did in a reply.

    Attributes:
        compute: as it was asked for.
        lossless: whether every token was made by the whole model after all.
        tokens: of the reply after its first, which the prompt's pass gives.
        reduced: of them, made with less than the whole model.
        layer_mask: blocks that ran for reduced tokens, [2i] and [2i+1] of layer i; of "entropy" empty.
        skipped_share: of all blocks of the tokens after the first, those that did not run for them.
        large_share: of "entropy": tokens that the large model made, over all.
        switches: of "entropy": how often the other model took over.
        caught_up: tokens that were fed later, for the cache of a model or layer that had not seen them.
        parameter_share: of "entropy": parameters that the tokens went through, over those of the large model for each;
            catching up left out.
        decide_ms: deciding what to leave out, after the prompt.
        predicted_ms: of a reduced pass, by measured costs of blocks; None where these are not known.
        predicted_speedup: of such a pass over the whole model's, by the same costs.
        per_token_ms: measured, all told.
        plain_ms: of a pass of the whole model over one token; None where that is not known.
        saved_ms: by the reply as a whole against `plain_ms` for each token; below 0 it cost more.
        divergence: nats from the whole model's predictions, mean over all tokens, by those sampled; None without any.
        sampled: tokens that tell it.
        quality_floor: as it was asked for.
        stopped_at: tokens after which the floor ended it; None where it did not.
    """

    compute: str
    lossless: bool = False
    tokens: int = 0
    reduced: int = 0
    layer_mask: tuple[bool, ...] = ()
    skipped_share: float = 0.0
    large_share: float | None = None
    switches: int = 0
    caught_up: int = 0
    parameter_share: float | None = None
    decide_ms: float = 0.0
    predicted_ms: float | None = None
    predicted_speedup: float | None = None
    per_token_ms: float | None = None
    plain_ms: float | None = None
    saved_ms: float | None = None
    divergence: float | None = None
    sampled: int = 0
    quality_floor: float | None = None
    stopped_at: int | None = None
