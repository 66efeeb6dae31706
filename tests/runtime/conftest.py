"""Checkpoints and float32 bundles of every model family, made once for all tests of the runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from edgeinfer.bundle.store import Bundle
from edgeinfer.export.options import ExportConfig
from tests.factories import VARIANTS
from tests.runtime.models import bundle_of, checkpoint_of


@dataclass(frozen=True)
class Family:
    """A random checkpoint, as transformers' own model and as a float32 bundle."""

    name: str
    checkpoint: Path
    bundle: Bundle

    known: dict[tuple[int, ...], NDArray[np.float32]] = field(default_factory=dict, repr=False)

    @cached_property
    def model(self) -> Any:
        """transformers' model."""
        return transformers.AutoModelForCausalLM.from_pretrained(self.checkpoint)

    def expected(self, tokens: Sequence[int]) -> NDArray[np.float32]:  # (S, V)
        """Logits of a text in one pass of transformers."""
        key = tuple(tokens)
        if key not in self.known:
            with torch.no_grad():
                self.known[key] = self.model(torch.tensor([key])).logits[0].numpy()
        return self.known[key]


@pytest.fixture(scope="session")
def make_family() -> Callable[..., Family]:
    """Makes a family by its variant's name and settings; asked again, gives the one it made."""

    @cache
    def make(name: str, **settings: Any) -> Family:
        bundle = bundle_of(name, ExportConfig(bits=32), **settings)
        return Family(name, checkpoint_of(name, **settings), bundle)

    return make


@pytest.fixture(scope="session", params=list(VARIANTS))
def family(request: pytest.FixtureRequest, make_family: Callable[..., Family]) -> Family:
    """Every variant in turn."""
    return make_family(request.param)
