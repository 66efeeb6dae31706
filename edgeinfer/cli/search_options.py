"""Options of a reply that is searched for; knows nothing of any one command."""

from __future__ import annotations

import argparse

from edgeinfer.searching import SEARCHES

__all__ = ["add_search_options"]


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of SearchOptions, by its names."""
    group = parser.add_argument_group("search")
    group.add_argument("--search", choices=SEARCHES, help="how the reply is searched for (default: off)")
