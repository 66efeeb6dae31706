"""A small random chat model as a bundle, made once for all tests of the public face."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.profile.costs import PassCosts
from edgeinfer.runtime.profile.settings import TunedSettings
from edgeinfer.runtime.speculation import costs as device_costs
from edgeinfer.runtime.tuning.search import Effort
from edgeinfer.runtime.tuning.stopwatch import LOADED, PROMPTS, Times
from tests.cache import made
from tests.factories import make_bigram_bundle, make_checkpoint
from tests.speculation import random_bundle

TEMPLATE = (
    "<s>{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def small_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 4-bit bundle with a chat template and a context of 512 tokens, and its checkpoint."""
    return made(make_small, copy_to=tmp_path_factory.mktemp("small") / "made") / "small"


def make_small(folder: Path) -> None:
    make_checkpoint(folder / "checkpoint", "llama", chat_template=TEMPLATE, max_position_embeddings=512)
    export_checkpoint(
        folder / "checkpoint",
        folder / "small",
        ExportConfig(bits=4, keep_small=False, name="small", calibration="none"),
    )


@pytest.fixture(scope="module")
def loaded(small_bundle: Path) -> Iterator[edgeinfer.Model]:
    """The model, loaded once for a module."""
    with edgeinfer.load(small_bundle, threads=1) as model:
        yield model


@pytest.fixture
def model(loaded: edgeinfer.Model) -> edgeinfer.Model:
    """The loaded model with an empty cache."""
    loaded.score([5, 6])
    return loaded


@pytest.fixture(scope="session")
def short_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model for `small_bundle`, of fewer layers and with a context of 32 tokens."""
    return random_bundle(tmp_path_factory.mktemp("short"), max_position_embeddings=32, num_hidden_layers=2)


@pytest.fixture(scope="session")
def bigrams(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a backend that verifies chains and can do nothing else."""
    return make_bigram_bundle(tmp_path_factory.mktemp("bigrams") / "bundle")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def told_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of which nothing is timed: drafting pays there."""
    monkeypatch.setattr(device_costs, "measure_passes", lambda *_, **__: PassCosts(((1, 1.0), (32, 1.05))))
    monkeypatch.setattr(device_costs, "measure_guesses", lambda drafter, context: 1e-6)
    monkeypatch.setattr(device_costs, "measure_reading", lambda *_: (0, 0.0))


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuning a device measures as little as it can, and is sure of nothing."""
    for name in ("FULL", "QUICK"):
        monkeypatch.setattr(f"edgeinfer.tools.devices.{name}", Effort((7, 8), 0.05))


def made_up_stopwatch(factor: Callable[[TunedSettings], float]) -> type[Any]:
    """A stopwatch that loads nothing and tells made-up times.

    Args:
        factor: what settings multiply the times by that they change; called once a visit.
    """

    class MadeUp:
        longest_prompt = 512

        def __init__(self, *_: object) -> None:
            self._visits = 0

        def __enter__(self) -> MadeUp:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def __call__(self, way: TunedSettings, task: str) -> Times:
            self._visits += 1
            # Every visit a little different, as all that is measured.
            jitter = 1 + (self._visits * 7 % 5 - 2) / 1000
            prompt = jitter * factor(way)
            if task == PROMPTS:
                return {"prompt": prompt}
            reply = 5.0 * jitter * (factor(way) if way.prefill_chunk is None else 1.0)
            times = {"prompt": prompt, "decode": reply, "verify": reply, "turn": 64 * prompt + 128 * reply}
            return times | ({"load": 100.0 * jitter} if task == LOADED else {})

    return MadeUp
