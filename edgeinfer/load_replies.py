"""Options by which a model is loaded for certain replies: how many side by side, and whether by grammars."""

from __future__ import annotations

from edgeinfer.options import option
from edgeinfer.records import dataclass

__all__ = ["LoadReplies"]


@dataclass(frozen=True, kw_only=True)
class LoadReplies:
    """Which replies there is memory and time for."""

    # How many there are, batches and servers say; for these there is memory.
    parallel: int = option(
        1,
        help="number of replies side by side to plan memory for (default: 1)",
        low=1,
        high=1024,
        metavar="N",
        cli="--parallel",
        group="resources",
    )
    # Without it memory is planned for them when the first is asked for, and what was loaded by then stays as it is.
    structured: bool = option(
        False,
        help="plan memory for replies by a schema, an expression or a grammar from the start (default: when the first "
        "is asked for)",
        cli="--structured",
        group="resources",
    )
    # As Sarathi-Serve's bound on the time between tokens; by default a multiple of what passes take here.
    inter_token_latency: float | None = option(
        None,
        help="milliseconds between tokens of replies while the prompt of another is evaluated beside them (default: "
        "twice as many as without it)",
        low=0,
        high=4_000_000,
        above=True,
        metavar="MS",
    )
