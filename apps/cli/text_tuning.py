"""What `edgeinfer tune` learns from a text: what full contexts lose, uncertainty, steering, a judge of drafts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import edgeinfer
from edgeinfer.apps.cli.output import print_json, print_table, progress_bar
from edgeinfer.apps.cli.text_files import read_text
from edgeinfer.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from edgeinfer.tools import CacheLoss, CacheTuning


LearntT = TypeVar("LearntT")


def tune_cache(args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Measures policies on a text and prints what they lose."""
    text = None if args.text is None else read_text(args.text)
    with progress_bar() as bar:
        told = None if bar is None else (lambda done, total: bar("readings", done, total))
        found = edgeinfer.tools.tune_cache(args.model, text, progress=told, **options)
    if args.json:
        print_json(asdict(found))
    else:
        _print(found)
    return 0


def tune_uncertainty(args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Learns when searches take the next token for uncertain."""
    found = _learnt(args, "--uncertainty", partial(edgeinfer.tools.tune_uncertainty, args.model, **options))
    rows = [
        ("uncertain above", f"{found.threshold:.2f} nats, as {found.above:.0%} of {found.tokens} tokens were"),
        ("not the likeliest", f"{found.wrong:.0%} of them"),
    ]
    return _tell(args, found, rows)


def tune_steering(args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Learns a steering vector."""
    learn = partial(edgeinfer.tools.tune_steering, args.model, args.steering, **options)
    found = _learnt(args, "--steering", learn)
    rows = [
        ("vector", f"{found.name}, of {found.entries} tokens"),
        ("validation", f"{found.plain:.3f} nats a token, {found.steered:.3f} with it, over {found.tokens} tokens"),
    ]
    return _tell(args, found, rows)


def tune_judge(args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Teaches a judge of drafted tokens."""
    found = _learnt(args, "--judge", partial(edgeinfer.tools.tune_judge, args.model, **options), "questions")
    rows = [
        ("drafted tokens that differ", f"{found.tokens} in {found.questions} replies, {found.matter:.0%} matter"),
        ("on other questions", f"{found.kept:.0%} of the rest stay; {found.lost:.0%} of the replies lose"),
        ("area under the curve", f"{found.area:.3f}"),
    ]
    return _tell(args, found, rows)


def _learnt(args: argparse.Namespace, flag: str, learn: Callable[..., LearntT], read: str = "tokens") -> LearntT:
    """What is learnt from the text that an option needs."""
    if args.text is None:
        raise UsageError(f"{flag} learns from a text.", "Name one with --text.")
    text = read_text(args.text)
    with progress_bar() as bar:
        told = None if bar is None else (lambda done, total: bar(read, done, total))
        return learn(text, progress=told)


def _tell(args: argparse.Namespace, found: DataclassInstance, rows: Sequence[tuple[str, ...]]) -> int:
    if args.json:
        print_json(asdict(found))
    else:
        print_table(rows)
    return 0


def _print(found: CacheTuning) -> None:
    rows = [_row(loss, found) for loss in (found.whole, *found.losses)]
    header = ("overflow", "context", "text", "copied", "", "needles", "")
    title = f"perplexity over {found.kept.tokens} tokens, and how many were foreseen"
    print_table(rows, title=title, header=header)
    kept = found.kept
    facts = [("auto takes", f"{kept.policy}, which is lossy")]
    facts += [("it loses", f"{kept.text:.3f} nats on text, {kept.copying:.3f} copying, {kept.needles:.3f} on needles")]
    facts += [(f"no {name}", why) for name, why in found.unusable.items()]
    print_table(facts)


def _row(loss: CacheLoss, found: CacheTuning) -> tuple[str, ...]:
    name = "all of the text" if loss is found.whole else loss.policy
    text, copying, needles = (f"{each.perplexity:.2f}" for each in loss.kinds)
    shares = f"{loss.copying.share:.0%}", f"{loss.needles.share:.0%}"
    return name, str(loss.context), text, copying, shares[0], needles, shares[1]
