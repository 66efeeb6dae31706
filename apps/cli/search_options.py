"""Options of a reply that is searched for; knows nothing of any one command."""

from __future__ import annotations

import argparse

from edgeinfer.searching import ANSWERS, SEARCHES

__all__ = ["add_search_options"]


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of SearchOptions, by its names."""
    group = parser.add_argument_group("search")
    text = (
        "samples: several replies side by side; first-finish, vote: of several the first to end, or the commonest; "
        "cautious, lookahead, contrast: more care where the next token is uncertain; momentum: resist repetition; "
        "beam: beam search. All are lossy but samples (default: off)"
    )
    group.add_argument("--search", choices=SEARCHES, help=text)
    text = "replies drawn by samples, first-finish and vote (default: 4)"
    group.add_argument("--samples", type=int, metavar="N", help=text)
    text = "what of a reply vote counts: the text, its last line, its last number (default: text)"
    group.add_argument("--answer", choices=ANSWERS, help=text)
    group.add_argument("--beams", type=int, metavar="N", help="beginnings that beam keeps (default: 4)")
    text = "groups of beams that avoid each other's tokens (default: 1)"
    group.add_argument("--beam-groups", type=int, metavar="N", help=text)
    text = "log-probability a token loses for each earlier group that chose it (default: 0.5)"
    group.add_argument("--diversity", type=float, metavar="X", help=text)
    text = "beam compares log-probability / length to the power of X (default: 1)"
    group.add_argument("--length-penalty", type=float, metavar="X", help=text)
    group.add_argument("--look-ahead", type=int, metavar="N", help="tokens that lookahead looks ahead (default: 5)")
    text = "tokens that lookahead and momentum choose among (default: 3 and 5)"
    group.add_argument("--candidates", type=int, metavar="N", help=text)
    text = "entropy in nats above which lookahead and contrast take care (default: 1.5)"
    group.add_argument("--uncertainty", type=float, metavar="X", help=text)
    text = "of contrast: a worse prompt, whose reply is to be avoided"
    group.add_argument("--lame-prompt", metavar="TEXT", help=text)
    text = "how far contrast moves away from it (default: 0.5)"
    group.add_argument("--contrast-strength", type=float, metavar="X", help=text)
    text = "what momentum takes off for repeating 1, 2, ... tokens, with commas (default: 0,0,0,5)"
    group.add_argument("--resistance", type=_numbers, metavar="X,X", help=text)
    text = "by which momentum multiplies it (default: 0.2)"
    group.add_argument("--resistance-weight", type=float, metavar="X", help=text)


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))
