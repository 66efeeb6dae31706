"""A small random chat model as a bundle, made once for all tests of the public face."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import edgeinfer
from edgeinfer.export import ExportConfig, export_checkpoint
from tests.factories import make_bigram_bundle, make_checkpoint
from tests.speculation import random_bundle

TEMPLATE = (
    "<s>{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def small_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 4-bit bundle with a chat template and a context of 512 tokens."""
    folder = tmp_path_factory.mktemp("small")
    make_checkpoint(folder / "checkpoint", "llama", chat_template=TEMPLATE, max_position_embeddings=512)
    return export_checkpoint(
        folder / "checkpoint", folder / "small", ExportConfig(bits=4, keep_small=False, name="small")
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
