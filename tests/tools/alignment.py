"""How far draws from a list are from the model's own distribution over it: by a mask alone, and aligned.

    python -m tests.tools.alignment [--draws 200]

The built-in model goes on with a story by one of a few texts. The exact distribution is that of beams which find all of
them. Divergences are of counted draws, so that 0 is not reached: see the last line.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from typing import Any

import edgeinfer

_PROMPT = "Once upon a time, there was a"
_TEXTS = (
    *(" little girl who loved the zebra", " little boy who ate seven", " little cat", " little", " big"),
    *(" big dog", " big, red parliament", " brave knight of", " small bird.", " small bird in Paris", " boy", " king"),
)
_SMOOTHED = 0.5


def divergence(exact: dict[str, float], seen: Counter[str]) -> float:
    """KL divergence of counted draws from the exact distribution, each text counted half a time more."""
    draws = sum(seen.values()) + _SMOOTHED * len(exact)
    return sum(p * math.log(p * draws / (seen[text] + _SMOOTHED)) for text, p in exact.items() if p)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200)
    draws = parser.parse_args().draws
    model = edgeinfer.load(threads=1)
    options: dict[str, Any] = {"choices": _TEXTS, "max_tokens": 24}
    found = model.generate(_PROMPT, search="beam", beams=16, length_penalty=0.0, **options).search
    assert found is not None and len(found.texts) == len(_TEXTS), "beams found all of them"
    chances = {each.text: math.exp(each.score * len(each.token_ids)) for each in found.texts}
    exact = {text: chance / sum(chances.values()) for text, chance in chances.items()}
    ways: dict[str, dict[str, Any]] = {"mask": {"speculation": "off"}}
    ways |= {f"aligned, {rounds} rounds of 4": {"search": "aligned", "rounds": rounds} for rounds in (2, 8, 32)}
    for name, way in ways.items():
        seen: Counter[str] = Counter()
        passes = 0
        for seed in range(draws):
            result = model.generate(_PROMPT, temperature=1.0, seed=seed, **options, **way)
            seen[result.text] += 1
            passes += result.search.passes if result.search else result.usage.completion_tokens
        print(f"{name}: divergence {divergence(exact, seen):.3f}, {passes / draws:.1f} passes a reply")
    ideal = Counter({text: round(draws * p) for text, p in exact.items()})
    print(f"the exact distribution, rounded to as many draws: {divergence(exact, ideal):.3f}")


if __name__ == "__main__":
    _main()
