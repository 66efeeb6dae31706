"""Checkpoints and float32 bundles of every model family, made once for all tests of the runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from edgeinfer.bundle import Bundle, open_bundle
from edgeinfer.export import ExportConfig, export_checkpoint
from tests.factories import VARIANTS, make_checkpoint


@dataclass(frozen=True)
class Family:
    """A random checkpoint, as transformers' own model and as a float32 bundle."""

    name: str
    model: Any
    bundle: Bundle

    known: dict[tuple[int, ...], NDArray[np.float32]] = field(default_factory=dict, repr=False)

    def expected(self, tokens: Sequence[int]) -> NDArray[np.float32]:  # (S, V)
        """Logits of a text in one pass of transformers."""
        key = tuple(tokens)
        if key not in self.known:
            with torch.no_grad():
                self.known[key] = self.model(torch.tensor([key])).logits[0].numpy()
        return self.known[key]


@pytest.fixture(scope="session")
def make_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Family]:
    """Makes a family by its variant's name and settings; asked again, gives the one it made."""
    # Models this small run no faster on more threads, and far slower where other work shares the cores.
    torch.set_num_threads(1)

    @cache
    def make(name: str, **settings: Any) -> Family:
        folder = tmp_path_factory.mktemp(name)
        model = make_checkpoint(folder / "checkpoint", name, **settings)
        path = export_checkpoint(folder / "checkpoint", folder / "bundle", ExportConfig(bits=32))
        return Family(name, model, open_bundle(path))

    return make


@pytest.fixture(scope="session", params=list(VARIANTS))
def family(request: pytest.FixtureRequest, make_family: Callable[..., Family]) -> Family:
    """Every variant in turn."""
    return make_family(request.param)
