"""Backends whose passes are cut into windows of layers."""

from __future__ import annotations

from typing import Any

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.runtime.backends.onnx.windowed import CachedExperts, StreamedLayers
from tests.alone import Alone


def stream_layers(inner: Alone[Any], window: int, *meter: Any, **how: Any) -> Alone[Any]:
    streamed = StreamedLayers(inner.model, window, *meter, **how)
    inner.model.cut_into(streamed)
    return inner


def cache_experts(inner: Alone[Any], decoder: DecoderSpec, limit: int, **how: Any) -> Any:
    """The backend, whose `expert_cache` is that of its experts."""
    cached = CachedExperts(inner.model, decoder, limit, **how)
    inner.model.cut_into(cached)
    inner.model.expert_cache = cached.expert_cache
    return inner
