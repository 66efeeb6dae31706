"""Options by which a model has adapters (LoRA) beside its weights, and a reply is made with one, or steered."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from edgeinfer.errors import UsageError
from edgeinfer.options import Range, option, require, require_few
from edgeinfer.records import dataclass

# Each pass has a look at what all of them change.
_MOST = 64
# Steering vectors of a reply, and how far each may be scaled.
_MOST_VECTORS, _SCALE = 8, Range(-100, 100)


@dataclass(frozen=True, kw_only=True)
class LoadAdapters:
    """Adapters that a model is loaded with."""

    adapters: Mapping[str, str] = option(
        factory=dict,
        help="folders of LoRA adapters in PEFT's layout that replies may be made with, by name",
        cli="--lora",
        metavar="NAME=PATH",
        group="model",
    )

    def check_adapters(self) -> None:
        """Refuses what are no names and paths, and makes the paths texts.

        Raises:
            UsageError: `adapters` has such.
        """
        given = self.adapters
        texts = isinstance(given, Mapping) and all(
            isinstance(name, str) and name and isinstance(path, str | Path) for name, path in given.items()
        )
        require(texts, "adapters", given, "a mapping of names to folders")
        require_few("adapters", list(given), _MOST)
        object.__setattr__(self, "adapters", {name: str(path) for name, path in given.items()})

    def refuse_adapters(self, engine: str) -> None:
        """Refuses adapters where what runs the model takes none.

        Raises:
            UsageError: there are some.
        """
        if self.adapters:
            message = f"{engine} runs this model, and takes no adapters."
            raise UsageError(message, "Load a bundle where the native kernel works, or leave the adapters out.")


@dataclass(frozen=True, kw_only=True)
class ReplyAdapter:
    """With which adapter a reply is made, and which vectors steer it."""

    adapter: str | None = option(
        None,
        help="name of the adapter to use, of those that --lora names (default: none)",
        cli="--adapter",
        metavar="NAME",
        group="model",
    )
    steering: str | None = option(
        None,
        help="steering vectors of the model's bundle to add to its logits, and how strongly, such as story:1.5,terse "
        "(default: none)",
        cli="--steering",
        metavar="NAME:X",
        group="model",
    )

    def check_steering(self) -> None:
        """Refuses what names no vectors and scales.

        Raises:
            UsageError: `steering` is such.
        """
        require(isinstance(self.steering, str | None), "steering", self.steering, "names of vectors with their scales")
        steering_in(self.steering)


def steering_in(text: str | None) -> dict[str, float]:
    """The scales of the steering vectors that a text names, such as "story:1.5,terse"; without one it is 1."""
    found: dict[str, float] = {}
    for part in [] if text is None else text.split(","):
        name, colon, scale = part.strip().partition(":")
        try:
            number = float(scale) if colon else 1.0
        except ValueError:
            number = math.nan
        valid = bool(name) and name not in found and _SCALE.holds(number)
        require(valid, "steering", text, "names with scales from -100 to 100, each name once, such as story:1.5,terse")
        found[name] = number
    require(len(found) <= _MOST_VECTORS, "steering", text, f"no more than {_MOST_VECTORS} vectors")
    return found
