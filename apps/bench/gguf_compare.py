"""edgeinfer beside llama-cpp-python's `Llama` on one GGUF file: speed, text, memory; knows nothing of how they decode.

    python -m edgeinfer.apps.bench.gguf_compare MODEL.gguf --data DATA -t 1 --per-category 4

Every way to decode has a process of its own, and all others sleep while one answers. Ways take turns on each prompt; a
prompt's figure is the median of its repeats. `Llama` is timed by its generator of tokens, edgeinfer by its finished
chunks of text. What edgeinfer learns is not kept between runs.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from edgeinfer.apps.bench.driver import Worker
from edgeinfer.apps.bench.environment import script_json
from edgeinfer.apps.bench.prompts import RETELLING, Prompt, builtin_prompts, load_prompts
from edgeinfer.apps.bench.tables import print_table
from edgeinfer.apps.bench.timing import rotated
from edgeinfer.errors import EdgeInferError

__all__ = ["Compared", "compare", "main"]

_SCRIPT = Path(__file__).with_name("gguf_worker.py")
_PLAIN, _LOOKUP = "Llama", "Llama + prompt lookup"
_OURS, _AUTO = "edgeinfer, plain", "edgeinfer, auto"
# What the binding's documentation advises for CPUs; its default, 10, is for GPUs.
_LOOKUP_TOKENS = 2
_MB = 1e6


@dataclass(frozen=True)
class Compared:
    """Outcome.

    Attributes:
        per_token_ms: by way of decoding, the median of each prompt, in the prompts' order.
        ttft_ms: as `per_token_ms`, of the first reply to each prompt.
        categories: of the prompts.
        agreeing: by way of decoding, prompts whose text is that of `Llama`, token by token.
        peak_rss: by way of decoding, bytes.
        facts: by way of decoding: seconds of loading, and edgeinfer's plan.
    """

    per_token_ms: Mapping[str, Sequence[float]]
    ttft_ms: Mapping[str, Sequence[float]]
    categories: Sequence[str]
    agreeing: Mapping[str, int]
    peak_rss: Mapping[str, int]
    facts: Mapping[str, Any]

    def speed(self, way: str, category: str | None = None) -> float:
        """Times as fast as `Llama`, the geometric mean over prompts."""
        pairs = zip(self.per_token_ms[_PLAIN], self.per_token_ms[way], self.categories, strict=True)
        return geometric_mean([plain / mine for plain, mine, of in pairs if category in (None, of)])

    def slowest(self, way: str) -> float:
        """Times as fast as `Llama` on the prompt where that is least."""
        return min(a / b for a, b in zip(self.per_token_ms[_PLAIN], self.per_token_ms[way], strict=True))


def compare(
    model: str,
    prompts: Sequence[Prompt],
    *,
    threads: int,
    context: int,
    tokens: int,
    repeats: int,
    kv: str | None = None,
) -> Compared:
    """Has every way to decode answer every prompt.

    Args:
        kv: of edgeinfer's cache; None is its default, which is also `Llama`'s.

    Raises:
        BackendError: an engine failed.
    """
    with contextlib.ExitStack() as stack:
        workers = dict(_workers(stack, model, threads, context, kv))
        ids = [workers[_OURS].ask("tokenize_chat", messages=list(prompt.messages)) for prompt in prompts]
        ids = [each[-(context - tokens) :] for each in ids]
        replies: dict[str, list[list[dict[str, Any]]]] = {way: [] for way in workers}
        for number, prompt in enumerate(ids):
            for way in workers:
                replies[way].append([])
            for repeat in range(repeats):
                # Backwards every second time, so that none always follows the same other.
                ways = rotated(list(workers), number + repeat)
                for way in ways[::-1] if repeat % 2 else ways:
                    replies[way][-1].append(workers[way].ask("reply", prompt=prompt, tokens=tokens))
        texts = {way: [each[0]["token_ids"] for each in of] for way, of in replies.items()}
        return Compared(
            per_token_ms={w: [median(r["per_token_ms"] for r in each) for each in of] for w, of in replies.items()},
            ttft_ms={way: [each[0]["ttft_ms"] for each in of] for way, of in replies.items()},
            categories=[prompt.category for prompt in prompts],
            agreeing={
                way: sum(mine == plain for mine, plain in zip(of, texts[_PLAIN], strict=True))
                for way, of in texts.items()
            },
            peak_rss={way: worker.ask("peak_rss") for way, worker in workers.items()},
            facts={way: worker.ask("facts") for way, worker in workers.items()},
        )


def _workers(
    stack: contextlib.ExitStack, model: str, threads: int, context: int, kv: str | None
) -> Iterator[tuple[str, Worker]]:
    options = {"path": model, "threads": threads, "context": context, "kv": kv, "remember": False}
    plain = stack.enter_context(Worker("edgeinfer-replies", options | {"speculation": "off"}, script=_SCRIPT))
    yield _OURS, plain
    yield _AUTO, stack.enter_context(Worker("edgeinfer-replies", options, script=_SCRIPT))
    theirs = {"path": model, "threads": threads, "context": context, "stop_ids": plain.ask("stop_ids")}
    for name, lookup in ((_PLAIN, 0), (_LOOKUP, _LOOKUP_TOKENS)):
        yield name, stack.enter_context(Worker("llama-replies", theirs | {"lookup": lookup}, script=_SCRIPT))


def _print(result: Compared, title: str) -> None:
    categories = list(dict.fromkeys(result.categories))
    header = ["", "ms/token", "speed", *categories, "slowest", "first ms", "same text", "peak MB", "load s"]
    rows = []
    for way in (_PLAIN, _LOOKUP, _OURS, _AUTO):
        speeds = [f"{result.speed(way, category):.3f}" for category in categories]
        figures = [f"{median(result.per_token_ms[way]):.2f}", f"{result.speed(way):.3f}", *speeds]
        figures += [f"{result.slowest(way):.3f}", f"{median(result.ttft_ms[way]):.0f}"]
        figures += [f"{result.agreeing[way]}/{len(result.categories)}"]
        rows.append([way, *figures, f"{result.peak_rss[way] / _MB:.0f}", f"{result.facts[way]['load_s']:.2f}"])
    print_table(title, header, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison; exit code 1 where it failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("--data", type=Path, help="folder of data sets (default: built-in dialogues)")
    parser.add_argument("--categories", nargs="+", default=list(RETELLING), help="of prompts (default: %(default)s)")
    parser.add_argument("--per-category", type=int, default=4, help="prompts of each (default: %(default)s)")
    parser.add_argument("-t", "--threads", type=int, default=1, help="of every engine (default: %(default)s)")
    parser.add_argument("-c", "--context", type=int, default=1024, help="of every engine (default: %(default)s)")
    parser.add_argument("-n", "--tokens", type=int, default=128, help="of a reply at most (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="replies to each prompt (default: %(default)s)")
    parser.add_argument("--kv", help="of edgeinfer's cache (default: float16, as llama.cpp's)")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    args = parser.parse_args(arguments)
    try:
        of = args.categories
        found = load_prompts(args.data, args.per_category, categories=of) if args.data else None
        prompts = found or builtin_prompts(args.per_category, of)
        sizes = {"threads": args.threads, "context": args.context, "tokens": args.tokens, "repeats": args.repeats}
        result = compare(args.model, prompts, **sizes, kv=args.kv)
    except EdgeInferError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    _print(result, f"{Path(args.model).name}: {args.threads} threads, context {args.context}, {len(prompts)} prompts")
    if args.out:
        args.out.write_text(script_json("gguf_compare", {"options": sizes, **vars(result)}), "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
