"""Drafting with fewer of a model's own experts: what it guesses right, what it costs, what that makes; knows no engine.

python -m edgeinfer.apps.bench.moe_drafting BUNDLE --text FILE [--tokens 400] [--replies 4] [--json OUT]

First every count of experts along a given text: how often the guess is the model's own, and the milliseconds of both
kinds of pass, which take turns. From these and from the measured c(m), the best speed-up that drafts of any length
could reach if every guess were right as often as the first. Then replies, plain and drafted in turns, whose tokens must
be the same.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import edgeinfer
from edgeinfer.apps.bench.environment import script_json
from edgeinfer.apps.bench.tables import print_table
from edgeinfer.errors import UsageError

__all__ = ["Counted", "Drafted", "best_speedup", "main"]

_LENGTHS = (1, 2, 3, 4, 6, 8)
_PAST = 128
_PROMPT = 24


@dataclass(frozen=True)
class Counted:
    """One number of experts for each token of a draft.

    Attributes:
        same_best, overlap: share of guesses that are the model's own, greedily and when sampling.
        cost: of a draft pass, as a share of a pass.
        length, speedup: the best draft by these figures, and what it would make; length 0 is not to draft.
    """

    count: int
    same_best: float
    overlap: float
    cost: float
    length: int
    speedup: float


@dataclass(frozen=True)
class Drafted:
    """Replies drafted with fewer experts against plain ones of the same prompts.

    Attributes:
        same_tokens: whether every reply had the tokens of the plain one.
        speedup: plain milliseconds per token over drafted ones, median of the replies.
    """

    count: int
    replies: int
    same_tokens: bool
    drafted: int
    accepted: int
    tokens_per_pass: float
    speedup: float


def best_speedup(accepted: float, cost: float, passes: dict[int, float]) -> tuple[int, float]:
    """The draft length of most tokens per time, and its speed-up; 0 and 1 where none is faster than plain decoding.

    Args:
        accepted: chance that a guess is right, the same at every place.
        cost: of a guess, in passes.
        passes: c(m) by m, in milliseconds.
    """
    best = 0, 1.0
    for length in (m - 1 for m in passes if m > 1):
        tokens = sum(accepted**i for i in range(length + 1))
        speedup = tokens / (length * cost + passes[length + 1] / passes[1])
        best = max(best, (length, speedup), key=lambda found: found[1])
    return best


def count_experts(model: edgeinfer.Model, tokens: list[int]) -> tuple[list[Counted], dict[int, float]]:
    """Every number of experts below the model's own along a text, and c(m) in milliseconds by m."""
    counts = model.experts_per_token
    if len(counts) < 2:
        raise UsageError("This model has no experts to leave out.", "Give a bundle of a mixture of experts.")
    times = model.measure_passes((1, *(n + 1 for n in _LENGTHS)), past=_PAST, repeats=15)
    passes = {rows: statistics.median(ms) for rows, ms in times.items()}
    found = []
    for count in counts[:-1]:
        compared = model.compare_fewer_experts(tokens, count)
        cost = compared.fewer_ms / compared.pass_ms
        length, speedup = best_speedup(compared.same_best, cost, passes)
        found.append(Counted(count, compared.same_best, compared.overlap, cost, length, speedup))
    return found, passes


def draft(args: argparse.Namespace, count: int, prompts: list[list[int]]) -> Drafted:
    """Replies of a model that drafts with so many experts, in turns with plain ones."""
    same, drafted, accepted, ratios, lengths = True, 0, 0, [], []
    options = {"threads": args.threads, "context": args.context, "draft_experts": count, "speculation": "experts"}
    with edgeinfer.load(args.bundle, **options) as model:
        for prompt in prompts:
            plain = model.generate(prompt, max_tokens=args.length, temperature=0, speculation="off")
            reply = model.generate(prompt, max_tokens=args.length, temperature=0)
            same &= plain.token_ids == reply.token_ids
            drafted, accepted = drafted + reply.speculation.drafted, accepted + reply.speculation.accepted
            lengths.append(reply.speculation.mean_accepted_length)
            ratios.append(plain.timings.per_token_ms / reply.timings.per_token_ms)
    return Drafted(count, len(prompts), same, drafted, accepted, statistics.mean(lengths), statistics.median(ratios))


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark and prints its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text that the model was not made with")
    parser.add_argument("--tokens", type=int, default=400, help="of the text, along which guesses are compared")
    parser.add_argument("--replies", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="tokens of a reply")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    with edgeinfer.load(args.bundle, threads=args.threads, context=args.context, speculation="off") as model:
        # About six characters to a token, and room to spare.
        text = args.text.read_text("utf-8")[: 8 * (args.tokens + args.replies * _PROMPT)]
        ids = model.tokenize(text, parse_special=False)
        counted, passes = count_experts(model, ids[: args.tokens])
    starts = [args.tokens + i * _PROMPT for i in range(args.replies)]
    prompts = [ids[start : start + _PROMPT] for start in starts]
    replies = [draft(args, found.count, prompts) for found in counted]
    title = "c(m) in passes of one token, " + ", ".join(f"{m}: {ms / passes[1]:.2f}" for m, ms in passes.items())
    header = ["experts", "same best token", "overlap", "cost", "best length", "reaches"]
    rows = [
        [str(c.count), f"{c.same_best:.1%}", f"{c.overlap:.3f}", f"{c.cost:.2f}", str(c.length), f"{c.speedup:.2f}x"]
        for c in counted
    ]
    print_table(f"{title}; one takes {passes[1]:.2f} ms", header, rows)
    header = ["experts", "same tokens", "drafted", "accepted", "tokens per pass", "speed-up"]
    rows = [
        [
            str(r.count),
            "yes" if r.same_tokens else "NO",
            str(r.drafted),
            f"{r.accepted / r.drafted:.1%}" if r.drafted else "-",
            f"{r.tokens_per_pass:.2f}",
            f"{r.speedup:.2f}x",
        ]
        for r in replies
    ]
    print_table(f"replies of {args.length} tokens", header, rows)
    if args.json:
        data = {"passes_ms": passes, "counts": [asdict(c) for c in counted], "replies": [asdict(r) for r in replies]}
        args.json.write_text(script_json("moe_drafting", data), "utf-8")


if __name__ == "__main__":
    main()
