"""Prompts of a grid of lengths by entropy of the reply, after SPEED-Bench's throughput split (arXiv 2604.09557)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgeinfer.apps.bench.prompts import TokenizedPrompt
from edgeinfer.errors import PromptError

# Categories, or sources of such, by how much their prompts leave open about the reply: SPEED-Bench counts code and
# mathematics as low, writing and role play as high. What is named in neither is mixed.
ENTROPIES = {
    "low": (
        "tales/retell",
        "tales/again",
        "tales/start",
        "specbench/coding",
        "specbench/math",
        "specbench/math_reasoning",
        "specbench/extraction",
        "gsm8k",
    ),
    "mixed": (),
    "high": ("tales/write", "specbench/writing", "specbench/roleplay"),
}
_MIXED = "mixed"


def grid_prompts(items: Sequence[TokenizedPrompt], lengths: Sequence[int], per_cell: int) -> list[TokenizedPrompt]:
    """Prompts of each length and entropy, in the categories "low/512", "low/1024" and so on.

    A prompt is made longer by other prompts of its entropy before it, and cut at the front where it is too long: what
    is timed is real text throughout, as random tokens are accepted otherwise and use other experts.
    """
    by_entropy: dict[str, list[TokenizedPrompt]] = {name: [] for name in ENTROPIES}
    for item in items:
        by_entropy[_entropy(item.prompt.category)].append(item)
    grid: list[TokenizedPrompt] = []
    for entropy, found in by_entropy.items():
        for length in lengths:
            for place, item in enumerate(found[:per_cell]):
                ids = [token for each in (*found[place + 1 :], *found[: place + 1]) for token in each.ids]
                if len(ids) < length:
                    message = f"The prompts of {entropy} entropy have {len(ids)} tokens, not {length}."
                    raise PromptError(message, "Take more prompts (--per-category), or shorter lengths (--lengths).")
                prompt = replace(item.prompt, category=f"{entropy}/{length}", name=f"{item.prompt.name}@{length}")
                grid.append(TokenizedPrompt(prompt, tuple(ids[-length:]), max(0, len(item.ids) - length)))
    return grid


def _entropy(category: str) -> str:
    source = category.partition("/")[0]
    return next((name for name, listed in ENTROPIES.items() if category in listed or source in listed), _MIXED)
