"""Decoding with less than the whole model: what may be asked for, and what it did.

All of it is lossy, and results say so.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

from edgeinfer.errors import Setting, UsageError
from edgeinfer.methods import find_method
from edgeinfer.option_groups import OptionGroup
from edgeinfer.options import option
from edgeinfer.records import dataclass

# What fills the cache where layers were skipped and are needed after all.
SkipCache = Literal["exact", "below"]
SKIP_CACHES: tuple[str, ...] = get_args(SkipCache)
# The heading of help.
_COMPUTE = "reduced compute (lossy)"


# The choice of a method is called `compute` where options are flat and `method` in a group.
_METHOD: dict[str, Any] = {
    "help": "how much of the model each token uses: full, all of it; entropy, the draft model writes the easy parts; "
    "calibrated, some layers are skipped; exit, a pass ends early once the first layers are sure of the token "
    "(edgeinfer methods lists more; default: full)",
    "cli": "--compute",
    "metavar": "METHOD",
    "group": _COMPUTE,
}


@dataclass(frozen=True, kw_only=True)
class ComputeSettings:
    """What the methods of computing less go by.

    Ranges end where more is surely a mistake: a pass a thousand times faster, or more bits than a vocabulary has.
    """

    compute_speedup: float = option(
        1.5,
        help="target speedup of a pass that skips layers (default: 1.5)",
        low=1,
        high=1000,
        cli="--compute-speedup",
        metavar="X",
        group=_COMPUTE,
    )
    compute_share: float = option(
        0.5,
        help="share of tokens that the large model generates, for --compute entropy (default: 0.5)",
        low=0,
        high=1,
        cli="--compute-share",
        metavar="X",
        group=_COMPUTE,
    )
    entropy_threshold: float | None = option(
        None,
        help="entropy in bits above which the large model generates a token (default: derived from the share)",
        low=0,
        high=64,
        cli="--entropy-threshold",
        metavar="BITS",
        group=_COMPUTE,
    )
    entropy_stay: int = option(
        4,
        help="minimum number of tokens before the other model takes over (default: 4)",
        low=1,
        high=1024,
        cli="--entropy-stay",
        metavar="N",
        group=_COMPUTE,
    )
    exit_layer: int | None = option(
        None,
        help="number of layers after which a pass may end (default: as tuned, else the bundle's exit, else two thirds)",
        low=1,
        high=2048,
        cli="--exit-layer",
        metavar="N",
        group=_COMPUTE,
    )
    exit_confidence: float = option(
        0.9,
        help="probability of the likeliest token above which a pass ends early (default: 0.9)",
        low=0,
        high=1,
        cli="--exit-confidence",
        metavar="P",
        group=_COMPUTE,
    )
    skip_cache: SkipCache = option(
        "exact",
        help="keys and values of layers that an early exit left out: computed later (exact), or copied from "
        "the layer below (default: exact)",
        choices=SKIP_CACHES,
        cli="--skip-cache",
        group=_COMPUTE,
    )
    # The mean over the reply's tokens, by sampled passes of the whole model.
    quality_floor: float | None = option(
        None,
        help="divergence from the full model's predictions above which the full model takes over (default: "
        "not checked)",
        low=0,
        high=1000,
        cli="--quality-floor",
        metavar="NATS",
        group=_COMPUTE,
    )


@dataclass(frozen=True, kw_only=True)
class ComputeOptions(ComputeSettings):
    """How much of the model each token takes, as one of a reply's options; `ReducedCompute` tells of the methods."""

    compute: str = option("full", **_METHOD)

    def check_compute(self) -> None:
        """Refuse an unknown method, and options that exclude each other."""
        _check(self.compute, self)


@dataclass(frozen=True)
class ReducedCompute(ComputeSettings, OptionGroup):
    """How much of the model each token takes: `model.generate(prompt, compute=ReducedCompute("exit", exit_layer=8))`.

    All methods but "full" are lossy. The whole model evaluates every prompt.

    Attributes:
        method: "entropy" lets a draft model write the parts that are easy to predict; "calibrated" skips the blocks
            that `edgeinfer tune --skip` chose; "exit" ends a pass early once the first layers are sure of the token;
            others are research.
        compute_speedup: target speedup of a pass that skips layers.
        compute_share: for "entropy": share of tokens that the large model generates.
        entropy_threshold: entropy in bits above which the large model generates a token; None follows the share.
        entropy_stay: minimum number of tokens before the other model takes over.
        exit_layer: number of layers after which a pass may end; None means as tuned, else the bundle's exit, else two
            thirds of the layers.
        exit_confidence: probability of the likeliest token above which a pass ends early.
        skip_cache: keys and values of layers that an early exit left out: computed later ("exact"), or copied from the
            layer below ("below").
        quality_floor: divergence in nats from the full model's predictions above which the full model takes over.
    """

    mode: ClassVar[tuple[str, str] | None] = ("method", "compute")

    method: str = option("full", **_METHOD)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.method, self)


def _check(method: str, settings: ComputeSettings) -> None:
    below = settings.skip_cache != "exact"
    if method != "full":
        refused = getattr(find_method("compute", method), "refuses", ())
        given = {"skip_cache": below, "quality_floor": settings.quality_floor is not None}
        for name in refused:
            if given[name]:
                refusal = Setting(name, getattr(settings, name)) + f" does not go with compute={method!r}."
                raise UsageError(refusal, "Leave one of them out.")
    elif below:
        message = "skip_cache='below' works with early exits only."
        raise UsageError(message, "Use it with " + Setting("compute", "exit") + ", or leave it out.")
    if below and settings.quality_floor is not None:
        message = "quality_floor needs the full model's cache, which skip_cache='below' does not keep."
        raise UsageError(message, "Leave skip_cache or quality_floor out.")


def kept_layers(layers: int, speedup: float) -> list[int]:
    """Layers that unified skipping keeps, by the authors' rule (arXiv 2404.06954).

    They are first and last, and each multiple of an interval until int(L / speedup) layers are kept.

    Below three layers to keep there is nothing to space; first and last always stay.
    """
    count = int(layers / speedup)
    if count >= layers:
        return list(range(layers))
    kept = sorted({0, layers - 1})
    if count > 2:
        interval = int(layers / (count - 2 + 1))
        for layer in range(1, layers - 1):
            if layer % interval == 0 and len(kept) < count:
                kept.append(layer)
    return sorted(kept)


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
        large_share: of "entropy" and "steps": tokens that the large model made, over all.
        switches: of the same: how often the other model took over.
        caught_up: tokens that were fed later, for the cache of a model or layer that had not seen them; of "steps",
            those that were read and not taken.
        parameter_share: of the same: parameters that the tokens went through, over those of the large model for each;
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
