"""Random GGUF models, written or exported once for the tests of llama.cpp's backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.runtime.backends.llamacpp.backend import LlamaCppBackend
from tests.alone import Alone
from tests.runtime.backends.llamacpp.models import Shape, quantized, write_gguf

CAPACITY = 48
# Heads that quantized caches turn.
SHAPE = Shape(head_dim=64)
Q4_0, Q8_0 = 2, 7  # of `llama_ftype`


@pytest.fixture(scope="session")
def gguf_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bundle]:
    """Makes the bundle of a random model of a shape; asked again, gives the one it made."""

    @cache
    def make(shape: Shape = SHAPE, tokenizer: str = "gpt2", file_type: int = 0) -> Bundle:
        path = write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", shape, tokenizer=tokenizer)
        return open_bundle(quantized(path, file_type) if file_type else path)

    return make


@pytest.fixture
def make_backend(gguf_bundle: Callable[..., Bundle]) -> Any:
    """Makes backends that are closed after the test."""
    made: list[Alone[LlamaCppBackend]] = []

    def make(
        shape: Shape = SHAPE, capacity: int = CAPACITY, file_type: int = 0, **options: Any
    ) -> Alone[LlamaCppBackend]:
        made.append(Alone(LlamaCppBackend(gguf_bundle(shape, file_type=file_type), capacity, **options), capacity))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


@pytest.fixture(scope="module")
def bundles(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bundle]:
    """Exports a GGUF bundle once, by a name in the module's FAMILIES: classes and settings."""
    from edgeinfer.export.exporter import export_checkpoint
    from edgeinfer.export.options import ExportConfig
    from tests.factories import make_checkpoint

    @cache
    def make(name: str) -> Bundle:
        family, settings = request.module.FAMILIES[name]
        folder = tmp_path_factory.mktemp(name)
        make_checkpoint(folder / "checkpoint", family, **settings)
        config = ExportConfig(format="gguf", gguf_type="F32")
        return open_bundle(export_checkpoint(folder / "checkpoint", folder / "bundle", config))

    return make


@pytest.fixture
def make_family(request: pytest.FixtureRequest, bundles: Callable[[str], Bundle]) -> Iterator[Any]:
    """Makes backends of these bundles, of the module's CAPACITY and DRAFTED rows, that are closed after the test."""
    module, made = request.module, list[Alone[LlamaCppBackend]]()

    def make(name: str, kv: str = "float32") -> Alone[LlamaCppBackend]:
        made.append(
            Alone(
                LlamaCppBackend(bundles(name), module.CAPACITY, kv=kv, draft_rows=module.DRAFTED + 1), module.CAPACITY
            )
        )
        return made[-1]

    yield make
    for backend in made:
        backend.close()
