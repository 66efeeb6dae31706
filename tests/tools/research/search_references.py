"""How often searches choose the next token of reference answers, each behind the reference's own beginning.

python -m tests.tools.research.search_references FILE [-m MODEL] [--questions N] [--places N] [--json OUT]

FILE is mbpp's, gsm8k's or one of dialogues as `search_gains` reads, of which those with an answer are taken. This shows
differences on texts of which a model gets no whole answer right. Programs and sums are asked behind one example; the
worse prompt of "contrast" lacks it, and a dialogue's lacks all but the last message.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import edgeinfer
from edgeinfer import Model
from edgeinfer.errors import UsageError
from tests.methods import nested
from tests.tools.research.reporting import report_figures

_DRAWN = {"temperature": 0.8, "top_p": 0.95}
_GREEDY = "greedy"
# Tokens that each may look ahead: what it looks at decides of the first, which alone is judged.
METHODS: Mapping[str, Mapping[str, Any]] = {
    _GREEDY: {"temperature": 0.0, "max_tokens": 1},
    "one sample": _DRAWN | {"max_tokens": 1},
    "cautious": _DRAWN | {"search": "cautious", "max_tokens": 16},
    "lookahead": {"temperature": 0.0, "search": "lookahead", "max_tokens": 6},
    "contrast": {"temperature": 0.0, "search": "contrast", "max_tokens": 1},
}
# Tokens of a reference, so that it fits behind both prompts.
_LONGEST = 96
# A difference so many standard errors large is found with a chance of 80% by a test at 5%.
SEEN = 2.8


@dataclass(frozen=True)
class ReferenceText:
    """A prompt, a worse one, and the text that is right behind the prompt."""

    prompt: str
    worse: str
    reference: str


@dataclass(frozen=True)
class ReferenceShare:
    """One method over a file.

    Attributes:
        questions, places: that were judged, places over all questions.
        share: of places whose token was the reference's, mean over questions.
        gain: what that is more than greedy decoding's.
        visible: the least gain that so many questions would show.
        passes: over the model for a place, the prompt's own aside.
    """

    method: str
    questions: int
    places: int
    share: float
    gain: float
    visible: float
    passes: float


def read_references(path: Path, most: int, model: Model) -> list[ReferenceText]:
    """The first questions of a file.

    Raises:
        UsageError: a line is none.
    """
    try:
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        if "code" in lines[0]:
            asked = [(f'"""\n{line["text"]}\n{line["test_list"][0]}\n"""\n', line["code"]) for line in lines]
        elif "question" in lines[0]:
            asked = [(f"Question: {line['question']}\nAnswer: ", line["answer"]) for line in lines]
        else:
            texts = []
            for line in lines:
                if line.get("answer"):
                    whole, last = (
                        model.detokenize(model.tokenize_chat(each), special=True)
                        for each in (line["messages"], line["messages"][-1:])
                    )
                    texts.append(ReferenceText(whole, last, line["answer"]))
            return texts[:most]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UsageError(f"{path} has a line that is no question.", "See --help for the form.") from error
    example = "".join(asked[0]) + "\n\n"
    return [ReferenceText(example + prompt, prompt, reference) for prompt, reference in asked[1 : most + 1]]


def measure_references(
    model: Model, texts: Sequence[ReferenceText], places: int, seeds: int, only: Sequence[str] = ()
) -> Iterator[ReferenceShare]:
    """Every method, or only some beside greedy decoding, at evenly spaced places of every reference."""
    plain = list[float]()
    for method, options in METHODS.items():
        if only and method not in (_GREEDY, *only):
            continue
        draws = range(seeds if options["temperature"] else 1)
        found, passes, judged = list[float](), 0, 0
        for text in texts:
            right, tried = 0, 0
            for before, token in _places(model, text, places):
                worse: dict[str, Any] = {}
                if method == "contrast":
                    worse["lame_prompt"] = text.worse + model.detokenize(before, special=True)
                prompt = [*model.tokenize_prompt(text.prompt), *before]
                for seed in draws:
                    result = model.generate(prompt, seed=seed, speculation="off", **nested({**worse, **options}))
                    right += result.token_ids[0] == token
                    tried += 1
                    passes += 0 if result.search is None else result.search.passes
            if tried:
                found.append(right / tried)
            judged += tried
        plain = plain or found
        gains = [one - other for one, other in zip(found, plain, strict=True)]
        visible = SEEN * statistics.pstdev(gains) / math.sqrt(len(gains))
        share = statistics.fmean(found)
        yield ReferenceShare(method, len(found), judged, share, statistics.fmean(gains), visible, passes / judged)


def _places(model: Model, text: ReferenceText, most: int) -> list[tuple[list[int], int]]:
    """The reference's tokens before some evenly spaced places, and the one that is there."""
    ids = model.tokenize_data(text.reference)[:_LONGEST]
    step = max(1, len(ids) // most)
    return [(ids[:place], ids[place]) for place in range(0, len(ids), step)][:most]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("-m", "--model", default=None)
    parser.add_argument("--questions", type=int, default=40, metavar="N", help="number of questions (default: 40)")
    parser.add_argument("--places", type=int, default=8, metavar="N", help="number of places of each (default: 8)")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="of methods that draw (default: 2)")
    parser.add_argument("--methods", default="", metavar="NAME,NAME", help="to measure (default: all)")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args(arguments)
    return report_figures(_measured(args), args.json)


def _measured(args: argparse.Namespace) -> Iterator[tuple[ReferenceShare, str]]:
    if min(args.questions, args.places, args.seeds) < 1:
        raise UsageError("A count is below 1.", "Give --questions, --places and --seeds of at least 1.")
    only = args.methods.split(",") if args.methods else ()
    with edgeinfer.load(args.model, remember=False) as model:
        texts = read_references(args.file, args.questions, model)
        for share in measure_references(model, texts, args.places, args.seeds, only):
            told = f"{share.share:6.1%}, {share.gain:+6.1%} beside greedy (visible from {share.visible:.1%})"
            yield share, f"{share.method:12} {told}, {share.places} places, {share.passes:5.2f} passes"


if __name__ == "__main__":
    sys.exit(main())
