"""What following a long list of choices takes: the trie as arrays beside one of dictionaries.

    python -m tests.tools.choice_lists [--entries 100000] [--vocabulary 151936]

Entries are texts of two to eight tokens, whose first ones are few, as names and titles have them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from edgeinfer.runtime.sampling.constraint import ChoiceConstraint, ChoiceTrie

_END = 0
_ROUNDS = 7
_TEXTS = 16
_Text = tuple[int, ...]


def entries(count: int, vocabulary: int, seed: int) -> list[_Text]:
    """Different token sequences; tokens go by Zipf's law, so that many begin alike."""
    chance = np.random.default_rng(seed)
    found = set[_Text]()
    while len(found) < count:
        lengths = chance.integers(2, 9, count)
        tokens = chance.zipf(1.2, int(lengths.sum())) % (vocabulary - 1) + 1
        found |= {tuple(part.tolist()) for part in np.split(tokens, np.cumsum(lengths)[:-1])}
    texts = sorted(found)
    return [texts[at] for at in chance.choice(len(texts), count, replace=False)]


def dictionaries(texts: Sequence[_Text]) -> dict[int, Any]:
    """The same trie, each node a dictionary."""
    root: dict[int, Any] = {}
    for text in texts:
        node = root
        for token in (*text, _END):
            node = node.setdefault(token, {})
    return root


def milliseconds(work: Callable[[], object]) -> float:
    """The least processor time of a few runs."""
    times = []
    for _ in range(_ROUNDS):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return min(times) * 1e3


def steps(count: int, vocabulary: int, seed: int) -> dict[str, float]:
    """Milliseconds of building, and of the mean step of a walk along entries: what may follow, and its logits."""
    texts = entries(count, vocabulary, seed)
    logits = np.random.default_rng(seed).normal(0, 3, (_TEXTS, vocabulary)).astype(np.float32)
    flat = logits.reshape(-1)
    trie, nodes = ChoiceTrie(texts, [_END]), dictionaries(texts)
    walked = [texts[at] for at in np.random.default_rng(seed).integers(0, len(texts), 256)]
    tokens, root = sum(map(len, walked)), ChoiceConstraint(trie)

    def alone() -> None:
        constraint = ChoiceConstraint(trie)
        for text in walked:
            for token in text:
                logits[0][constraint.allowed()].argmax()
                constraint.push(token)
            constraint.pop(len(text))

    def by_dictionary() -> None:
        for text in walked:
            node = nodes
            for token in text:
                logits[0][np.fromiter(node, np.int64, len(node))].argmax()
                node = node[token]

    def together() -> None:
        for begin in range(0, len(walked), _TEXTS):
            part = walked[begin : begin + _TEXTS]
            # Beams have the first step in common.
            logits[0][root.allowed()].argmax()
            places = trie.after(np.zeros(_TEXTS, np.int64), np.array([text[0] for text in part]))
            for depth in range(1, max(map(len, part))):
                rows, ids = trie.followers(places)
                flat.take(rows * vocabulary + ids).argmax()
                places = trie.after(places, np.array([text[min(depth, len(text) - 1)] for text in part]))

    many = sum(max(map(len, walked[begin : begin + _TEXTS])) for begin in range(0, len(walked), _TEXTS))
    return {
        "building, arrays": milliseconds(lambda: ChoiceTrie(texts, [_END])),
        "building, dictionaries": milliseconds(lambda: dictionaries(texts)),
        "MB, arrays": trie.nbytes / 1e6,
        "tokens at the first step": float(len(root.allowed())),
        "first step": milliseconds(lambda: logits[0][root.allowed()].argmax()),
        "mean step of one text": milliseconds(alone) / tokens,
        "the same by dictionaries": milliseconds(by_dictionary) / tokens,
        f"mean step of {_TEXTS} texts": milliseconds(together) / many,
    }


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for name, value in steps(options.entries, options.vocabulary, options.seed).items():
        print(f"{name:28} {value:10.4f}" + ("" if name.startswith(("MB", "tokens")) else " ms"))


if __name__ == "__main__":
    _main()
