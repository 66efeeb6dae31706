"""Options of a reply that takes less compute; knows nothing of any one command."""

from __future__ import annotations

import argparse

from edgeinfer.adaptive import COMPUTES

__all__ = ["add_compute_options"]


def add_compute_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ComputeOptions, by its names."""
    group = parser.add_argument_group("less compute (lossy)")
    group.add_argument("--compute", choices=COMPUTES, help="how much of the model each token takes (default: full)")
