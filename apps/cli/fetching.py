"""A model that a command names, brought to this machine first: with a bar, and a question where there is a choice."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from edgeinfer.apps.cli.output import print_note, print_table, progress_bar
from edgeinfer.config import format_size

if TYPE_CHECKING:
    from edgeinfer.hub import Offer


class _Notes(logging.Handler):
    """Shows what is fetched and converted as lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        # Straight to stderr, which a bar that is shown has taken over: the line appears above it.
        sys.stderr.write(f"{record.getMessage()}\n")


_NOTES = _Notes()


def show_notes() -> None:
    """From now on a line on stderr tells what is fetched and converted."""
    log = logging.getLogger("edgeinfer.hub")
    log.setLevel(logging.INFO)
    if _NOTES not in log.handlers:
        log.addHandler(_NOTES)


def prepared(model: str | None, options: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Fetches and converts a model that is not here yet; what loads it, and the options but for those of converting."""
    rest = {name: value for name, value in options.items() if name != "bits"}
    if model is None and "bits" not in options:
        return None, rest
    from edgeinfer import hub  # not before a model is loaded: help needs none of what it brings

    show_notes()
    chosen: list[str] = []
    with progress_bar() as progress:
        path = hub.resolve(
            model,
            bits=options.get("bits"),
            memory=options.get("memory"),
            progress=progress or _silent,
            choose=type_question(chosen.append),
        )
    if chosen:
        return chosen[0], rest
    # The bits that were asked for, also where others are here too.
    return (str(path) if "bits" in options else model), rest


def type_question(tell: Callable[[str], None] = lambda _: None) -> Callable[[list[Offer]], str] | None:
    """Who asks on a terminal which type of a repository of GGUF files to take; None where there is no terminal.

    Args:
        tell: called with the name that was chosen.
    """
    if not (sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty() and sys.stdout.isatty()):
        return None

    def choose(offers: list[Offer]) -> str:
        name = _ask(offers)
        tell(name)
        return name

    return choose


def _ask(offers: list[Offer]) -> str:
    best = next((offer for offer in offers if offer.recommended), offers[0])
    rows = [_row(number, offer) for number, offer in enumerate(offers, 1)]
    print_table(rows, header=("", "type", "size", "memory", ""))
    while True:
        said = input(f"Which one? [{best.type or best.name}] ").strip()
        if not said:
            return best.name
        for number, offer in enumerate(offers, 1):
            if said.lower() in (str(number), offer.type.lower(), offer.name.lower()):
                return offer.name
        print_note(f"There is no {said}: give a number or a type, or nothing for {best.type or best.name}.")


def _row(number: int, offer: Offer) -> tuple[str, ...]:
    note = "recommended" if offer.recommended else "" if offer.fits else "more memory than there is"
    size = format_size(offer.bytes) if offer.bytes else "unknown"
    return str(number), offer.type or offer.name.partition(":")[2], size, format_size(offer.memory), note


def _silent(stage: str, done: int, total: int) -> None:
    """Where stderr is no terminal, lines tell enough."""
