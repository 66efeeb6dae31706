"""Options by which a model has adapters (LoRA) beside its weights, and a reply is made with one of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edgeinfer.errors import UsageError
from edgeinfer.options import option, require, require_few
from edgeinfer.records import dataclass

__all__ = ["LoadAdapters", "ReplyAdapter"]

# Each pass has a look at what all of them change.
_MOST = 64


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
    """With which adapter a reply is made."""

    adapter: str | None = option(
        None,
        help="name of the adapter to use, of those that --lora names (default: none)",
        cli="--adapter",
        metavar="NAME",
        group="model",
    )
