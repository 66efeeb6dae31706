"""Texts of 200 seeded replies: written once, compared after a change that must not move a bit.

    python -m tests.tools.seeded_texts texts.json              write them, or compare them with those of the file
    python -m tests.tools.seeded_texts texts.json -m MODEL     of another model than the built-in one

Every third reply is plain; others draft, search, follow a form, or share passes, from a loop of events too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import edgeinfer

PROMPTS = (
    "Once upon a time", "One day, a little dog named Max", "The sun was hot and", "Lily and Tom went to the park. Lily",
    "The cat and the dog. The cat and the dog. The cat", "A big red ball", "Mum said: do not", "In the forest",
)  # fmt: skip
WAYS: tuple[dict[str, Any], ...] = (
    {"speculation": "off"},
    {"speculation": "auto"},
    {"speculation": "ngram"},
    {"speculation": "off"},
    {"speculation": "copy", "repetition_penalty": 1.1},
    {"search": "best-of", "samples": 3, "temperature": 0.8},
    {"speculation": "off", "top_k": 20},
    {"json_schema": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}}},
    {"search": "beam", "beams": 3, "temperature": 0.0},
    {"speculation": "off", "top_p": 0.9, "min_p": 0.02},
    {"choices": ["a dog", "a cat", "the sun"]},
    {"logprobs": 2, "stop": ["."]},
)
SHARED = ({"speculation": "off"}, {"speculation": "auto"}, {"speculation": "ngram"})


def replies(model: edgeinfer.Model, tokens: int) -> Iterator[tuple[str, edgeinfer.Result]]:
    """The replies, each with its name."""
    draw = random.Random(48)
    for place in range(144):
        way = dict(WAYS[place % len(WAYS)])
        options = {"temperature": draw.choice((0.0, 0.7, 1.0)), "seed": place, "max_tokens": tokens} | way
        yield f"{place} {way}", model.generate(PROMPTS[place * 5 % 8] + " ", **options)
    for way in SHARED if model.can_batch else ():
        options = {"temperature": 0.8, "seed": 7, "max_tokens": tokens} | way
        for place, result in enumerate(model.generate_batch(list(PROMPTS), parallel=8, **options)):
            yield f"batch {place} {way}", result
        found = asyncio.run(_side_by_side(model, options))
        for place, result in enumerate(found):
            yield f"async {place} {way}", result
    chat = model.chat()
    for place in range(8):
        yield f"chat {place}", chat.send(PROMPTS[place], seed=place, temperature=0.6, max_tokens=tokens)


async def _side_by_side(model: edgeinfer.Model, options: dict[str, Any]) -> list[edgeinfer.Result]:
    return list(await asyncio.gather(*(model.agenerate(prompt, **options) for prompt in PROMPTS)))


def main() -> int:
    """The command; exit code 1 if a text differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("-m", "--model")
    parser.add_argument("--tokens", type=int, default=40)
    asked = parser.parse_args()
    with edgeinfer.load(asked.model, parallel=8, remember=False, context=512) as model:
        found = {
            name: [*result.token_ids, result.finish_reason, result.text]
            for name, result in replies(model, asked.tokens)
        }
    if not asked.file.exists():
        asked.file.write_text(json.dumps(found, indent=0), "utf-8")
        print(f"{len(found)} texts written.")
        return 0
    before = json.loads(asked.file.read_text("utf-8"))
    other = [name for name in before.keys() | found.keys() if before.get(name) != found.get(name)]
    print(f"{len(before) - len(other)} of {len(before)} texts are those of before.", *other, sep="\n")
    return 1 if other else 0


if __name__ == "__main__":
    sys.exit(main())
