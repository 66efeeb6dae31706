"""Random GGUF models, written once for all tests of llama.cpp's backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from edgeinfer.bundle import Bundle, open_bundle
from edgeinfer.runtime.backends.llamacpp.backend import LlamaCppBackend
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
    made: list[LlamaCppBackend] = []

    def make(shape: Shape = SHAPE, capacity: int = CAPACITY, file_type: int = 0, **options: Any) -> LlamaCppBackend:
        made.append(LlamaCppBackend(gguf_bundle(shape, file_type=file_type), capacity, **options))
        return made[-1]

    yield make
    for backend in made:
        backend.close()
