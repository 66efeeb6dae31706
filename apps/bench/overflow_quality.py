"""Measures what is lost where a text outgrows the context, for each overflow policy; knows the public face only.

python -m edgeinfer.apps.bench.overflow_quality [-m BUNDLE] [--stories FILE] [--dialogues FILE] [--context 128]
    [--policies window,merge,cluster] [--texts 24] [--json]

Every policy reads the same texts, token after given token, in a small context, and so does a context that holds each
text whole. What counts is the perplexity of the tokens behind the small context: of several stories one after the
other, of long stories alone, and of dialogues whose answers tell a story of an earlier turn again, word for word.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import edgeinfer
from edgeinfer.apps.bench.stories import SEPARATOR, read_stories
from edgeinfer.config import OVERFLOWS
from edgeinfer.errors import EdgeInferError, UsageError

__all__ = ["Loss", "main", "measure_losses"]

# A policy that makes no room is the one that has all the room.
WHOLE = "stop"
_RETOLD = ("again", "retell")
# A story alone must go on for so many contexts, so that there is more than one overflow.
_LONG = 2


@dataclass(frozen=True)
class Loss:
    """How one policy predicts what follows the first `context` tokens of the texts of a kind.

    Attributes:
        tokens: predicted behind the small context.
        perplexity: of them.
        change: of the perplexity against a context that holds each text whole, as a fraction.
        ms_per_token: of reading all, overflows included.
    """

    kind: str
    policy: str
    context: int
    texts: int
    tokens: int
    perplexity: float
    change: float
    ms_per_token: float


def measure_losses(
    model: str | None,
    kinds: dict[str, Callable[[edgeinfer.Model], list[list[int]]]],
    context: int,
    policies: Sequence[str],
) -> list[Loss]:
    """Reads the texts of each kind with each policy.

    Args:
        model: as `edgeinfer.load` takes it.
        kinds: make the texts of a kind, as token ids, longer than `context`.
        context: tokens that the small context holds.
        policies: of config.OVERFLOWS, but "stop".

    Raises:
        UsageError: a kind has no text that is long enough.
    """
    losses: list[Loss] = []
    with edgeinfer.load(model, speculation="off") as whole:
        texts = {kind: make(whole) for kind, make in kinds.items()}
        for kind, each in texts.items():
            if not each:
                raise UsageError(
                    f"No text of the kind {kind!r} outgrows {context} tokens.", "Give a smaller --context."
                )
            losses.append(_loss(whole, WHOLE, kind, each, context, None))
    bases = {loss.kind: loss.perplexity for loss in losses}
    for policy in policies:
        with edgeinfer.load(model, speculation="off", context=context, overflow=policy) as small:
            losses += [_loss(small, policy, kind, each, context, bases[kind]) for kind, each in texts.items()]
    return losses


def _loss(
    model: edgeinfer.Model, policy: str, kind: str, texts: list[list[int]], context: int, base: float | None
) -> Loss:
    begun = time.perf_counter()
    # The first log-probability is the second token's.
    behind = np.concatenate([model.score(text).logprobs[context - 1 :] for text in texts])
    ms = (time.perf_counter() - begun) * 1e3 / sum(map(len, texts))
    perplexity = float(np.exp(-behind.mean()))
    change = perplexity / base - 1 if base is not None else 0.0
    return Loss(kind, policy, context, len(texts), len(behind), perplexity, change, ms)


def _joined(model: edgeinfer.Model, stories: Iterable[str], count: int, context: int) -> list[list[int]]:
    """Stories one after the other, as many as the model's own context holds."""

    def texts() -> Iterator[list[int]]:
        text: list[int] = []
        for story in stories:
            ids = model.begin_ids + _bare(model, story)
            if len(text) + len(ids) > model.context:
                yield text
                text = []
            text = text + ids
        yield text

    return _some(texts(), count, context, model.context)


def _alone(model: edgeinfer.Model, stories: Iterable[str], count: int, context: int) -> list[list[int]]:
    """Stories of several contexts."""
    texts = (model.begin_ids + _bare(model, story) for story in stories)
    return _some(texts, count, _LONG * context, model.context)


def _retold(model: edgeinfer.Model, path: Path, count: int, context: int) -> list[list[int]]:
    """Dialogues in which a story is told again, with the answer."""
    dialogues: Iterator[dict[str, Any]] = map(json.loads, path.read_text("utf-8").splitlines())
    texts = (
        model.tokenize_chat(dialogue["messages"]) + _bare(model, dialogue["answer"])
        for dialogue in dialogues
        if dialogue["kind"] in _RETOLD
    )
    return _some(texts, count, context, model.context)


def _some(texts: Iterable[list[int]], count: int, least: int, most: int) -> list[list[int]]:
    """The first texts of more than `least` and at most `most` tokens."""
    return list(islice((text for text in texts if least < len(text) <= most), count))


def _bare(model: edgeinfer.Model, text: str) -> list[int]:
    """Token ids without the tokenizer's own begin token."""
    ids, begin = model.tokenize(text, parse_special=False), model.begin_ids
    return ids[len(begin) :] if begin and ids[: len(begin)] == begin else ids


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m edgeinfer.apps.bench.overflow_quality", description=__doc__.split("\n")[0]
    )
    parser.add_argument("-m", "--model", help="a bundle (default: the built-in model)")
    parser.add_argument("--stories", type=Path, help=f"text with stories separated by {SEPARATOR}")
    parser.add_argument("--dialogues", type=Path, help="JSON lines with kind, messages and answer")
    parser.add_argument("--context", type=int, default=128, help="tokens of the small context (default: 128)")
    parser.add_argument("--policies", default=",".join(OVERFLOWS[1:]), help="(default: %(default)s)")
    parser.add_argument("--texts", type=int, default=24, help="of each kind at most (default: 24)")
    parser.add_argument("--json", action="store_true")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script and returns its exit code."""
    args = _parser().parse_args(argv)
    kinds: dict[str, Callable[[edgeinfer.Model], list[list[int]]]] = {}
    try:
        if args.stories:
            stories = read_stories(args.stories, sys.maxsize)
            kinds["stories, joined"] = lambda model: _joined(model, stories, args.texts, args.context)
            kinds["a long story"] = lambda model: _alone(model, stories, args.texts, args.context)
        if args.dialogues:
            kinds["a story retold"] = lambda model: _retold(model, args.dialogues, args.texts, args.context)
        if not kinds:
            raise UsageError("There is nothing to read.", "Give --stories, --dialogues or both.")
        losses = measure_losses(args.model, kinds, args.context, args.policies.split(","))
    except EdgeInferError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    found = json.dumps([asdict(loss) for loss in losses], indent=1) + "\n"
    sys.stdout.write(found if args.json else _table(losses))
    return 0


def _table(losses: Sequence[Loss]) -> str:
    lines = ["| text | overflow | tokens behind the context | perplexity | change | ms per token |", "|" + "---|" * 6]
    for loss in sorted(losses, key=lambda loss: loss.kind):
        policy = "none, the whole text in context" if loss.policy == WHOLE else f"{loss.policy}, context {loss.context}"
        figures = f"{loss.tokens} | {loss.perplexity:.3f} | {loss.change:+.1%} | {loss.ms_per_token:.3f}"
        lines.append(f"| {loss.kind} | {policy} | {figures} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
