"""A few good models for devices, by short names: data that ships with edgeinfer, read when it is asked for."""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Iterable
from typing import Any

from edgeinfer.hub.estimate import DecoderSizes, gguf_memory
from edgeinfer.hub.ids import HubName, parse_name
from edgeinfer.records import dataclass

# What a checkpoint is converted to unless memory or the user says otherwise.
CATALOG_BITS = 4


@dataclass(frozen=True)
class CatalogModel:
    """A model that edgeinfer recommends.

    Attributes:
        name: short; loads it wherever a model is asked for.
        repo: on the hub, ORG/NAME, of a GGUF file ORG/NAME:TYPE.
        purpose: what it is good for, in a line.
        licence: by its SPDX name where it has one.
        languages: that its makers name, by ISO 639 where they have a code.
        context: tokens it was made for at most.
        sizes: of its decoder.
        file_bytes: of its GGUF file; 0 where a checkpoint is converted on this machine.
    """

    name: str
    repo: str
    purpose: str
    parameters: int
    licence: str
    languages: tuple[str, ...]
    context: int
    sizes: DecoderSizes
    file_bytes: int = 0

    @property
    def is_gguf(self) -> bool:
        """Whether llama.cpp runs it, which needs the extra `gguf`."""
        return self.file_bytes > 0

    @property
    def memory(self) -> int:
        """Bytes that running it at 4 bits takes with a context of 2048 tokens, by the sizes of its decoder."""
        return gguf_memory(self.file_bytes, self.sizes) if self.is_gguf else self.sizes.memory(CATALOG_BITS)

    @property
    def download(self) -> int:
        """Bytes that are fetched, where weights are stored in 16 bits as all of these are."""
        return self.file_bytes or 2 * self.parameters

    @property
    def disk(self) -> int:
        """Bytes of the model that runs."""
        return self.file_bytes or self.sizes.weight_bytes(CATALOG_BITS)

    @property
    def hub_name(self) -> HubName:
        """The repository, and the type of its GGUF file."""
        parsed = parse_name(self.repo)
        assert parsed is not None, "a test reads the data"
        return parsed


@functools.cache
def catalog() -> tuple[CatalogModel, ...]:
    """Good models for devices, each of which runs by its name: `edgeinfer chat -m qwen2.5-0.5b`."""
    text = importlib.resources.files("edgeinfer.hub").joinpath("catalog.json").read_text("utf-8")
    return tuple(_read(entry) for entry in json.loads(text))


def catalog_model(name: str) -> CatalogModel | None:
    """The model of that short name, however it is capitalized; None where there is none."""
    return next((model for model in catalog() if model.name == name.strip().lower()), None)


def similar_names(name: str, others: Iterable[str] = ()) -> list[str]:
    """Short names, and others that are given, that a mistyped name may stand for, the likeliest first."""
    import difflib

    wanted = name.strip().lower()
    known = {model.name: model.name for model in catalog()} | {other.lower(): other for other in others}
    starting = sorted(known[each] for each in known if wanted and each.startswith(wanted))
    return list(dict.fromkeys([*starting, *(known[m] for m in difflib.get_close_matches(wanted, known, 3, 0.6))]))[:3]


def _read(entry: dict[str, Any]) -> CatalogModel:
    fields = {**entry, "languages": tuple(entry["languages"]), "sizes": DecoderSizes(**entry["sizes"])}
    return CatalogModel(**fields)
