"""What searches gain on questions whose answers are known: right answers and passes beside greedy decoding.

python -m edgeinfer.apps.bench.research.search_gains DIALOGUES [-m MODEL] [--questions N] [--seeds N] [--json OUT]

DIALOGUES has a JSON object on each line: "messages" to answer, and "answer", the right text, or "words" that the text
is to have. Methods that draw are asked with several seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import edgeinfer
from edgeinfer import Model
from edgeinfer.errors import EdgeInferError, UsageError

__all__ = ["KnownQuestion", "SearchGain", "main", "measure", "read_questions"]

_DRAWN = {"temperature": 0.8, "top_p": 0.95}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "one sample": _DRAWN,
    "cautious": _DRAWN | {"search": "cautious"},
    "lookahead": {"temperature": 0.0, "search": "lookahead"},
    "vote": _DRAWN | {"search": "vote", "samples": 5, "answer": "text"},
    "best-of": _DRAWN | {"search": "best-of", "samples": 5},
    "beam": {"temperature": 0.0, "search": "beam", "beams": 4},
}


@dataclass(frozen=True)
class KnownQuestion:
    """What is asked, and how an answer is judged.

    Attributes:
        kind: of question, for the table.
        answer: the right text; or empty, where `words` tell.
    """

    kind: str
    messages: Sequence[Mapping[str, str]]
    answer: str
    words: tuple[str, ...]

    def score(self, text: str) -> float:
        """1 for the right text and 0 for others, or the share of the words that it has."""
        if self.answer:
            return float(_plain(text) == _plain(self.answer))
        return sum(word.lower() in text.lower() for word in self.words) / len(self.words)


@dataclass(frozen=True)
class SearchGain:
    """One method over one kind of questions.

    Attributes:
        answers: that were judged.
        score: their mean.
        error: twice its standard error, answers taken as independent.
        passes: over the model for each token of the answers.
    """

    method: str
    kind: str
    answers: int
    score: float
    error: float
    passes: float


def read_questions(path: Path, most: int) -> list[KnownQuestion]:
    """The first questions of each kind in a file.

    Raises:
        UsageError: a line is none.
    """
    found: dict[str, list[KnownQuestion]] = {}
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            data = json.loads(line)
            kind = data["kind"]
            question = KnownQuestion(kind, data["messages"], data.get("answer", ""), tuple(data.get("words", ())))
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"Line {number} of {path} is no question.", "See --help for the form.") from error
        if (question.answer or question.words) and len(found.setdefault(kind, [])) < most:
            found[kind].append(question)
    return [question for questions in found.values() for question in questions]


def measure(model: Model, questions: Sequence[KnownQuestion], seeds: int) -> Iterator[SearchGain]:
    """Every method over every kind of questions."""
    for kind in dict.fromkeys(question.kind for question in questions):
        asked = [question for question in questions if question.kind == kind]
        for method, options in METHODS.items():
            draws = range(seeds if options["temperature"] else 1)
            scores, passes, tokens = list[float](), 0, 0
            for question in asked:
                for seed in draws:
                    given = {"max_tokens": 100, "speculation": "off", "seed": seed, **options}
                    stream = model.stream_chat(question.messages, **given)
                    for _ in stream:
                        pass
                    result = stream.result
                    scores.append(question.score(result.text))
                    tokens += len(result.token_ids)
                    passes += len(result.token_ids) if result.search is None else result.search.passes
            error = 2 * statistics.pstdev(scores) / math.sqrt(len(scores))
            yield SearchGain(method, kind, len(scores), statistics.fmean(scores), error, passes / tokens)


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold().rstrip(".")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each method and kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dialogues", type=Path)
    parser.add_argument("-m", "--model", default=None)
    parser.add_argument("--questions", type=int, default=20, metavar="N", help="of each kind (default: 20)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="of methods that draw (default: 3)")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args(arguments)
    try:
        with edgeinfer.load(args.model, remember=False) as model:
            gains = []
            for gain in measure(model, read_questions(args.dialogues, args.questions), args.seeds):
                share = f"{gain.score:5.0%} ±{gain.error:4.0%}"
                print(f"{gain.kind:8} {gain.method:12} {share} of {gain.answers:3}, {gain.passes:5.2f} passes a token")
                sys.stdout.flush()
                gains.append(asdict(gain))
    except EdgeInferError as error:
        print(error, file=sys.stderr)
        return 2
    if args.json:
        args.json.write_text(json.dumps(gains, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
