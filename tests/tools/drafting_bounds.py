"""What no draft could exceed on a data set by priced costs: drafts that are all right, and odds that are known.

    python -m tests.tools.drafting_bounds BUNDLE DRAFTER DATA [--temps 0,0.7,1] [--categories tales]

Replies are plain decoding's. `all right` drafts every token of them rightly and free of charge, in rounds of the best
lengths. The other columns draft one chain with the drafter, whose lengths are the best for whoever knows each token's
odds: the overlap of both models' distributions, the sum of min(p, q), which no way of coupling their draws exceeds
(one less their total variation). `or copies` may draft what followed the longest earlier match instead, `or tables`
the likeliest token, as if tables knew it; their odds are its probability. At temperature 0 the odds are 0 or 1, so
whoever knows them knows the outcome.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import groupby, islice
from pathlib import Path
from statistics import fmean, geometric_mean

import numpy as np

import edgeinfer
from edgeinfer.apps.bench.prompts import STORIES, load_prompts, tokenize_prompts
from edgeinfer.apps.bench.render import markdown_table
from tests.tools.priced_drafting import CURVE, GUESSES

_MODEL_MS = GUESSES["model"]
_LONGEST = 15  # tokens of a draft
_SPEED_UPS = 3  # the first of the columns that are speed-ups
_SUFFIX = 8  # tokens that a copy's place is looked for by


def least_ms(odds: Sequence[float], guess_ms: float, round_ms: float) -> float:
    """What a text takes at least if each of its tokens, drafted behind right ones, is accepted with these odds."""
    left = [0.0] * (len(odds) + 1)  # from each token on
    for start in range(len(odds) - 1, -1, -1):
        left[start] = CURVE.ms(1) + left[start + 1]
        reached, ended = 1.0, 0.0  # odds that the whole draft is accepted; what follows where it is not
        for length in range(1, min(_LONGEST, len(odds) - start - 1) + 1):
            accepted = odds[start + length - 1]
            ended += reached * (1 - accepted) * left[start + length]
            reached *= accepted
            ms = CURVE.ms(1 + length) + round_ms + length * guess_ms
            left[start] = min(left[start], ms + ended + reached * left[start + length + 1])
    return left[0]


def copied(text: Sequence[int]) -> int | None:
    """The token behind the latest of the longest matches of a text's end, of two tokens at least."""
    for size in range(_SUFFIX, 1, -1):
        end = list(text[-size:])
        for start in range(len(text) - size - 1, -1, -1):
            if list(text[start : start + size]) == end:
                return text[start + size]
    return None


def _odds(
    model: edgeinfer.Model, drafter: edgeinfer.Model, prompt: Sequence[int], reply: Sequence[int], temperature: float
) -> np.ndarray:  # (R, 3): of each token by drafter, or copies, or tables
    text = [*prompt, *reply]
    first = len(prompt) - 1
    rows = (np.concatenate([part.copy() for part in each.logits(text)]) for each in (model, drafter))
    targets, drafts = (of[first : len(text) - 1] for of in rows)  # (R, V)
    found = []
    for place, (target, draft) in enumerate(zip(targets.astype(np.float64), drafts.astype(np.float64), strict=True)):
        copy = copied(text[: len(prompt) + place])
        if temperature == 0:
            right = (int(draft.argmax()) == reply[place], copy == reply[place])
            found.append((float(right[0]), float(any(right)), 1.0))
            continue
        p, q = (np.exp((row - row.max()) / temperature) for row in (target, draft))
        p, q = p / p.sum(), q / q.sum()
        overlap = float(np.minimum(p, q).sum())
        found.append((overlap, max(overlap, 0.0 if copy is None else float(p[copy])), max(overlap, float(p.max()))))
    return np.array(found).reshape(-1, 3)


def main() -> None:
    """Prints a table for each temperature."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle")
    parser.add_argument("drafter")
    parser.add_argument("data", type=Path)
    parser.add_argument("--temps", default="0,0.7,1")
    parser.add_argument("--categories")
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument(
        "--warm-up", type=int, default=0, help="further prompts, left out: those that drafters learn from"
    )
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--round-ms", type=float, default=0.5)
    args = parser.parse_args()
    with (
        edgeinfer.load(args.bundle, threads=1, remember=False) as model,
        edgeinfer.load(args.drafter, threads=1, remember=False) as drafter,
    ):
        categories = args.categories.split(",") if args.categories else None
        drawn = load_prompts(args.data, args.per_category + args.warm_up, categories=categories)
        kept = [one for _, of in groupby(drawn, lambda one: one.category) for one in islice(of, args.per_category)]
        prompts = tokenize_prompts(model, kept, args.max_tokens)
        for temperature in map(float, args.temps.split(",")):
            rows: dict[str, list[list[float]]] = {}
            for item in prompts:
                options = {"temperature": temperature, "seed": 0, "max_tokens": args.max_tokens}
                reply = model.generate(list(item.ids), speculation="off", **options).token_ids
                if len(reply) < 3:
                    continue
                odds = _odds(model, drafter, item.ids, reply, temperature)[1:]  # the prompt's pass gives the first
                plain = len(odds) * CURVE.ms(1)
                least = [least_ms([1.0] * len(odds), 0.0, args.round_ms)]
                least += [least_ms(column.tolist(), _MODEL_MS, args.round_ms) for column in odds.T]
                ways = [plain / ms for ms in least]
                rows.setdefault(item.prompt.category, []).append([float(len(reply)), *odds[:, :2].mean(0), *ways])
            means = {name: [fmean(column) for column in zip(*of, strict=True)] for name, of in rows.items()}
            stories = [means[name] for name in STORIES if name in means]
            columns = zip(*means.values(), strict=True)
            everything = [fmean(of) if at < _SPEED_UPS else geometric_mean(of) for at, of in enumerate(columns)]
            if stories:
                means["story categories"] = [fmean(column) for column in zip(*stories, strict=True)]
            means["all (speed-ups: geometric mean)"] = everything
            head = ("category", "tokens", "overlap", "or copy", "all right", "drafter", "or copies", "or tables")
            print(f"\ntemperature {temperature:g}\n")
            print(markdown_table(head, [(name, *(f"{value:.2f}" for value in of)) for name, of in means.items()]))


if __name__ == "__main__":
    main()
