"""What searches gain on questions whose answers are known: right answers and passes beside greedy decoding.

python -m tests.tools.research.search_gains DIALOGUES [-m MODEL] [--questions N] [--seeds N] [--json OUT]

DIALOGUES has a JSON object on each line: "messages" to answer, and "answer", the right text, or "words" that the text
is to have. Methods that draw are asked with several seeds. The worse prompt of "contrast" is the last message alone,
or its first half where there is no other.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import edgeinfer
from edgeinfer import Model
from edgeinfer.results import Result
from edgeinfer.runtime.research.judge import RightReply, read_questions
from tests.methods import nested
from tests.tools.research.reporting import report_figures
from tests.tools.research.search_references import SEEN

_DRAWN = {"temperature": 0.8, "top_p": 0.95}
# Of the model's own distribution; a scorer gives so many nats for each word that a story is to have.
_OWN = {"temperature": 1.0, "search": "particles", "samples": 5}
_WORD = 4.0
METHODS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "one sample": _DRAWN,
    "cautious": _DRAWN | {"search": "cautious"},
    "lookahead": {"temperature": 0.0, "search": "lookahead"},
    "contrast": {"temperature": 0.0, "search": "contrast"},
    "vote": _DRAWN | {"search": "vote", "samples": 5, "answer": "text"},
    "best-of": _DRAWN | {"search": "best-of", "samples": 5},
    "beam": {"temperature": 0.0, "search": "beam", "beams": 4},
    "particles^2": _OWN | {"power": 2.0},
    "particles^4": _OWN | {"power": 4.0},
}
# Methods that are told which words a story is to have.
SCORED: Mapping[str, Mapping[str, Any]] = {
    "best of 8": _DRAWN | {"search": "samples", "samples": 8},
    "particles": _OWN | _DRAWN | {"power": 1.0, "samples": 8},
    "astar": _DRAWN | {"search": "astar", "samples": 4, "rounds": 8},
}
# Searches whose scorer is told them.
_TOLD = ("particles", "astar")


@dataclass(frozen=True)
class SearchGain:
    """One method over one kind of questions.

    Attributes:
        answers: that were judged.
        score: their mean.
        error: twice its standard error, answers taken as independent.
        visible: the least gain over the first method that so many questions would show with a chance of 80%.
        passes: over the model for each token of the answers.
    """

    method: str
    kind: str
    answers: int
    score: float
    error: float
    visible: float
    passes: float


def read_first(path: Path, most: int) -> list[RightReply]:
    """The first questions of each kind in a file.

    Raises:
        UsageError: a line is none.
    """
    found: dict[str, list[RightReply]] = {}
    for question in read_questions(path.read_text("utf-8")):
        found.setdefault(question.kind, []).append(question)
    return [question for questions in found.values() for question in questions[:most]]


def measure(
    model: Model, questions: Sequence[RightReply], seeds: int, only: Sequence[str] = ()
) -> Iterator[SearchGain]:
    """Every method, or only some, over every kind of questions."""
    for kind in dict.fromkeys(question.kind for question in questions):
        asked, plain = [question for question in questions if question.kind == kind], list[float]()
        methods = {**METHODS, **({} if asked[0].whole else SCORED)}
        for method, options in methods.items():
            if only and method not in only:
                continue
            draws = range(seeds if options["temperature"] else 1)
            scores, passes, tokens = list[float](), 0, 0
            for question in asked:
                for seed in draws:
                    scored: dict[str, Any] = {"scorer": partial(_nats, question)} if method in _TOLD else {}
                    if method == "contrast":
                        scored["lame_prompt"] = model.detokenize(
                            model.tokenize_chat([_worse(question.messages)]), special=True
                        )
                    result = _reply(model, question, nested({**options, **scored, "seed": seed}))
                    texts = [result.text]
                    if method == "best of 8" and result.search is not None:
                        texts = [each.text for each in result.search.texts]
                    scores.append(max(map(question.share, texts)))
                    tokens += len(result.token_ids)
                    passes += len(result.token_ids) if result.search is None else result.search.passes
            error = 2 * statistics.pstdev(scores) / math.sqrt(len(scores))
            means = [statistics.fmean(scores[at : at + len(draws)]) for at in range(0, len(scores), len(draws))]
            plain = plain or means
            gains = [one - other for one, other in zip(means, plain, strict=True)]
            visible = SEEN * statistics.pstdev(gains) / math.sqrt(len(gains))
            yield SearchGain(method, kind, len(scores), statistics.fmean(scores), error, visible, passes / tokens)


def _reply(model: Model, question: RightReply, options: Mapping[str, Any]) -> Result:
    return model.generate(
        model.tokenize_chat(question.messages), **{"max_tokens": 100, "speculation": "off", **options}
    )


def _worse(messages: Sequence[Mapping[str, str]]) -> Mapping[str, str]:
    """The last message, as far as it is worse than all of them."""
    last = messages[-1]
    words = last["content"].split()
    return last if len(messages) > 1 else {**last, "content": " ".join(words[: len(words) // 2])}


def _nats(question: RightReply, text: str, ended: bool) -> float:
    """What a scorer says that is told the words."""
    return _WORD * len(question.met(text))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each method and kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dialogues", type=Path)
    parser.add_argument("-m", "--model", default=None)
    parser.add_argument("--questions", type=int, default=20, metavar="N", help="of each kind (default: 20)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="of methods that draw (default: 3)")
    parser.add_argument("--methods", default="", metavar="NAME,NAME", help="to measure (default: all)")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args(arguments)
    return report_figures(_measured(args), args.json)


def _measured(args: argparse.Namespace) -> Iterator[tuple[SearchGain, str]]:
    only = args.methods.split(",") if args.methods else ()
    with edgeinfer.load(args.model, remember=False) as model:
        for gain in measure(model, read_first(args.dialogues, args.questions), args.seeds, only):
            share = f"{gain.score:5.0%} ±{gain.error:4.0%}"
            told = f"{share} of {gain.answers:3} (visible from {gain.visible:.0%}), {gain.passes:5.2f} passes a token"
            yield gain, f"{gain.kind:8} {gain.method:12} {told}"


if __name__ == "__main__":
    sys.exit(main())
