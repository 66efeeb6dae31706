"""Replies that two models write together, beside those of each alone: how likely both find them, and what they took.

python -m tests.tools.research.two_models --draft-model MODEL [-m MODEL] [--prompts FILE] [--tokens N]

A prompt is a line of the file; without one, beginnings of stories. Replies are drawn at temperature 1. Times are of the
processor, so that they say something on a busy machine as well.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import edgeinfer
from edgeinfer import Model
from edgeinfer.errors import UsageError
from tests.tools.research.reporting import report_figures

_PROMPTS = (
    "Once upon a time there was a little girl who",
    "One day, a dog found a big red ball",
    "The old man lived alone in a small house",
    "Tom and his sister went to the park",
    "A bird sat on a tree and sang",
    "It was a rainy day, and Lily wanted to",
)
METHODS: Mapping[str, Mapping[str, Any]] = {
    "model": {},
    "anchored 1.5": {"search": "anchored", "anchor_budget": 1.5},
    "anchored 0.5": {"search": "anchored", "anchor_budget": 0.5},
    "anchored 0.15": {"search": "anchored"},
    "anchored 0.05": {"search": "anchored", "anchor_budget": 0.05},
    "anchored 0": {"search": "anchored", "anchor_budget": 0.0},
    "steps 0": {"compute": "steps", "method_options": {"step_advantage": 0.0}},
    "steps 0.5": {"compute": "steps"},
    "steps 1": {"compute": "steps", "method_options": {"step_advantage": 1.0}},
    "entropy": {"compute": "entropy"},
}


@dataclass(frozen=True)
class PairGain:
    """One way of writing, over all prompts.

    Attributes:
        tokens: of the replies.
        by_model, by_draft: log-probability of a token, by the model and by the draft model.
        divergence: nats a token that were spent of a budget; None where there is none.
        large_share: of the tokens, those that the model made; None where it made all.
        processor_ms: of a token.
    """

    method: str
    tokens: int
    by_model: float
    by_draft: float
    divergence: float | None
    large_share: float | None
    processor_ms: float


def measure(model: Model, draft: Model, prompts: Sequence[str], tokens: int, seeds: int) -> Iterator[PairGain]:
    """Every way, over the same prompts and seeds."""
    for method, options in METHODS.items():
        own, drafted, spent, shares, seconds = list[float](), list[float](), list[float](), list[float](), 0.0
        for prompt in prompts:
            ids = [*model.begin_ids, *model.tokenize(prompt)]
            for seed in range(seeds):
                given: dict[str, Any] = {"max_tokens": tokens, "temperature": 1.0, "seed": seed, "ignore_eos": True}
                model.score(ids[:2])  # so that every reply begins with its prompt
                started = time.process_time()
                result = model.generate(ids, speculation="off", **{**given, **options})
                seconds += time.process_time() - started
                text = [*ids, *result.token_ids]
                own += model.score(text).logprobs[len(ids) - 1 :].tolist()
                drafted += draft.score(text).logprobs[len(ids) - 1 :].tolist()
                if result.search is not None and result.search.divergence is not None:
                    spent.append(result.search.divergence / len(result.token_ids))
                if result.compute is not None and result.compute.large_share is not None:
                    shares.append(result.compute.large_share)
        yield PairGain(
            method,
            len(own),
            statistics.fmean(own),
            statistics.fmean(drafted),
            statistics.fmean(spent) if spent else None,
            statistics.fmean(shares) if shares else None,
            1e3 * seconds / len(own),
        )


def _prompts(path: Path | None) -> Sequence[str]:
    if path is None:
        return _PROMPTS
    found = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    if not found:
        raise UsageError(f"{path} contains no prompts.", "Write a prompt on each line.")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each way of writing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default=None)
    parser.add_argument("--draft-model", required=True, metavar="MODEL", help="small model with the same tokenizer")
    parser.add_argument("--prompts", type=Path, metavar="FILE")
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="of each reply (default: 100)")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="replies to each prompt (default: 2)")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args(arguments)
    return report_figures(_measured(args), args.json)


def _measured(args: argparse.Namespace) -> Iterator[tuple[PairGain, str]]:
    if min(args.tokens, args.seeds) < 1:
        raise UsageError("A count is below 1.", "Give --tokens and --seeds of at least 1.")
    small = args.draft_model
    given: dict[str, Any] = {"remember": False, "threads": 1, "context": 1024}
    with edgeinfer.load(args.model, draft_model=small, **given) as model, edgeinfer.load(small, **given) as draft:
        for gain in measure(model, draft, _prompts(args.prompts), args.tokens, args.seeds):
            spent = "" if gain.divergence is None else f", {gain.divergence:.3f} nats a token spent"
            share = "" if gain.large_share is None else f", {gain.large_share:.0%} by the model"
            likely = f"{gain.by_model:7.3f} by the model, {gain.by_draft:7.3f} by the draft model"
            yield gain, f"{gain.method:14} {likely}, {gain.processor_ms:5.2f} ms a token{spent}{share}"


if __name__ == "__main__":
    sys.exit(main())
