"""Options of a reply that takes less compute; knows nothing of any one command."""

from __future__ import annotations

import argparse

from edgeinfer.adaptive import COMPUTES, SKIP_CACHES

__all__ = ["add_compute_options"]


def add_compute_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ComputeOptions, by its names."""
    group = parser.add_argument_group("less compute (lossy)")
    text = (
        "how much of the model each token takes: all of it; entropy: the draft model writes where the text is easy; "
        "unified, calibrated, importance, routers: some layers are skipped; exit: sure tokens leave (default: full)"
    )
    group.add_argument("--compute", choices=COMPUTES, help=text)
    text = "how many times faster a pass with skipped layers is to be (default: 1.5)"
    group.add_argument("--compute-speedup", type=float, metavar="X", help=text)
    text = "share of tokens that the large model makes, of --compute entropy (default: 0.5)"
    group.add_argument("--compute-share", type=float, metavar="X", help=text)
    text = "bits of entropy above which it makes them (default: what gives that share)"
    group.add_argument("--entropy-threshold", type=float, metavar="BITS", help=text)
    text = "tokens that a model makes at least before the other one takes over (default: 4)"
    group.add_argument("--entropy-stay", type=int, metavar="N", help=text)
    text = "layers after which a pass may be left (default: the bundle's, or two thirds)"
    group.add_argument("--exit-layer", type=int, metavar="N", help=text)
    text = "probability from which on the first layers are believed (default: 0.9)"
    group.add_argument("--exit-confidence", type=float, metavar="P", help=text)
    text = "deeper layers run later for tokens that left, or take keys and values of the layer below (default: exact)"
    group.add_argument("--skip-cache", choices=SKIP_CACHES, help=text)
    text = "leave nothing more out where predictions diverge this far from the whole model's (default: not checked)"
    group.add_argument("--quality-floor", type=float, metavar="NATS", help=text)
