"""Scales found by reading texts: what they fit, what they are kept as, and that they are the same every time."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from edgeinfer.bundle import Bundle, KVScales, RopeSpec
from edgeinfer.bundle.kv_scales import LayerScales, add_kv_scales
from edgeinfer.bundle.kv_types import KV, load, store
from edgeinfer.errors import UsageError
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import ForwardInput
from edgeinfer.runtime.backends.onnx.backend import OnnxBackend
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.kv_cache.calibration import MOST_ROWS, calibrate
from edgeinfer.runtime.kv_cache.errors import attention_errors
from edgeinfer.runtime.profile.kv_scales import keep_kv_scales, kept_kv_scales_file, kv_scales

if TYPE_CHECKING:
    from tests.runtime.conftest import Family

TEXTS = [np.random.default_rng(n).integers(0, 320, 40).tolist() for n in range(3)]
NEW = np.random.default_rng(9).integers(0, 320, 60).tolist()


def rope_of(bundle: Bundle) -> RopeSpec:
    assert bundle.manifest.decoder is not None
    return bundle.manifest.decoder.rope


def squared_error(family: Family, kv: str, scales: KVScales) -> float:
    """Of all cached rows of a text."""
    backend = ReferenceBackend(family.bundle, 64)
    backend.forward(ForwardInput(np.array(NEW), np.arange(len(NEW)), np.zeros(0, np.int64)))
    held, kind, total = backend.cache.snapshot(), KV[kv], 0.0
    for own, keys, values in zip(scales.of(kv), held.keys, held.values, strict=True):
        for rows, of in ((keys, own.keys), (values, own.values)):
            total += float(np.square(load(kind, store(kind, rows, of), of) - rows).sum())
    return total


def scaled(scales: KVScales, factor: float) -> KVScales:
    f = np.float32(factor)
    layers = {kv: tuple(LayerScales(s.keys * f, s.values * f) for s in each) for kv, each in scales.layers.items()}
    return KVScales(layers, scales.tokens)


def test_scales_are_found_and_fit(family: Family) -> None:
    backend = OnnxBackend(family.bundle, 64)
    seen: list[tuple[str, int, int]] = []
    scales = calibrate(backend, TEXTS, rope_of(family.bundle), progress=lambda *step: seen.append(step))
    assert backend.cache.length == 0 and scales.tokens == 120
    backend.close()
    assert [step[1:] for step in seen] == [(0, 3), (1, 3), (2, 3)]
    scales.check(family.bundle.manifest.geometry)
    for kv in ("int8", "int4"):
        # Of a text that was not seen; smaller scales clip too much, and larger ones waste a bit.
        found = squared_error(family, kv, scales)
        assert squared_error(family, kv, scaled(scales, 0.4)) > 1.5 * found
        assert squared_error(family, kv, scaled(scales, 2.5)) > 1.5 * found


def test_attention_is_nearly_the_same_with_int8(family: Family) -> None:
    scales = calibrate(ReferenceBackend(family.bundle, 64), TEXTS, rope_of(family.bundle))
    errors = {error.kv: error for error in attention_errors(family.bundle, [NEW, NEW[:5]], scales)}
    assert len(errors["int8"].layers) == family.bundle.manifest.geometry.num_layers
    assert 0 < errors["int8"].mean < 0.03 < errors["int4"].mean < 0.3
    assert max(errors["int8"].layers) < 0.04


def test_the_model_goes_on_with_the_texts(make_family: Callable[..., Family]) -> None:
    bundle = make_family("llama").bundle
    one, two = (
        calibrate(ReferenceBackend(bundle, 30), [[1, 2, 3], [4]], rope_of(bundle), reply_tokens=20) for _ in range(2)
    )
    assert one.tokens == 23 + 21
    assert [one.digest(kv) for kv in one.layers] == [two.digest(kv) for kv in two.layers]
    assert one.digest("int8") != calibrate(ReferenceBackend(bundle, 30), [[1, 2, 3], [4]], rope_of(bundle)).digest(
        "int8"
    )


def test_texts_are_cut_at_the_context_and_at_the_rows_there_is_room_for(make_family: Callable[..., Family]) -> None:
    bundle = make_family("llama").bundle
    assert calibrate(ReferenceBackend(bundle, 30), [NEW, NEW], rope_of(bundle), reply_tokens=50).tokens == 60
    assert calibrate(ReferenceBackend(bundle, 64), [NEW] * 50, rope_of(bundle)).tokens == 50 * (MOST_ROWS // 50)


def test_nothing_to_calibrate_by(make_family: Callable[..., Family]) -> None:
    bundle = make_family("llama").bundle
    backend = ReferenceBackend(bundle, 64)
    with pytest.raises(UsageError, match="no text"):
        calibrate(backend, [[]], rope_of(bundle))
    quantized = ReferenceBackend(bundle, 64, kv="int8", kv_scales=calibrate(backend, TEXTS, rope_of(bundle)))
    with pytest.raises(UsageError, match="float32 KV cache"):
        calibrate(quantized, TEXTS, rope_of(bundle))


def test_channels_that_are_always_zero(make_family: Callable[..., Family]) -> None:
    """Heads of 18 channels are padded to 24 by zeros."""
    bundle = make_family("llama-mha-odd-sizes").bundle
    geometry = bundle.manifest.geometry
    scales = calibrate(ReferenceBackend(bundle, 64), TEXTS, rope_of(bundle))
    backend = OnnxBackend(bundle, 64, kv="int4", kv_scales=scales)
    backend.forward(ForwardInput(np.array(NEW), np.arange(len(NEW)), np.zeros(0, np.int64)))
    seen: list[Floats] = []

    def look(layer: int, keys: Floats, values: Floats) -> tuple[Floats, Floats]:
        seen.append(values)
        return keys, values

    backend.cache.rewrite(look)
    backend.close()
    assert geometry.head_dim == 24
    assert not any(values[..., 18:].any() for values in seen) and all(values[..., :18].any() for values in seen)


def test_scales_are_kept_for_a_bundle(make_family: Callable[..., Family], caplog: pytest.LogCaptureFixture) -> None:
    bundle, other = (make_family(name).bundle for name in ("qwen2", "qwen3"))
    scales = calibrate(ReferenceBackend(bundle, 64), TEXTS, rope_of(bundle))
    assert kv_scales(bundle) is None
    keep_kv_scales(bundle, scales)
    kept = kv_scales(bundle)
    assert kept is not None and kept.digest("int4") == scales.digest("int4") and kv_scales(other) is None
    for damage in (b"{", b"[]", b"{}", b"\xff", b"[" * 100_000, b" " * 10**6):
        path = kept_kv_scales_file(bundle)
        path.write_bytes(damage)
        with caplog.at_level(logging.WARNING):
            assert kv_scales(bundle) is None
        assert "cannot be read and is discarded" in caplog.text and not path.exists()
        caplog.clear()


def test_the_bundles_own_scales_come_first(make_family: Callable[..., Family], tmp_path: Path) -> None:
    bundle = make_family("qwen2").bundle
    own, kept = (calibrate(ReferenceBackend(bundle, 64), texts, rope_of(bundle)) for texts in (TEXTS, [NEW]))
    shutil.copytree(bundle.path, tmp_path / "bundle")
    sealed = add_kv_scales(tmp_path / "bundle", own)
    keep_kv_scales(sealed, kept)
    found = kv_scales(sealed)
    assert found is not None and found.digest("int8") == own.digest("int8")
    kept_kv_scales_file(sealed).unlink()


def test_keys_fit_at_places_that_the_texts_did_not_reach(make_family: Callable[..., Family]) -> None:
    """Channels that turn slowly hold other numbers far on in the context."""
    bundle = make_family("llama", max_position_embeddings=4096).bundle
    rope = rope_of(bundle)
    scales = calibrate(ReferenceBackend(bundle, 64), TEXTS, rope)
    backend = ReferenceBackend(bundle, 4096)
    backend.forward(ForwardInput(np.array(NEW), np.arange(len(NEW)) + 4000, np.zeros(0, np.int64)))
    held = backend.cache.snapshot()
    beyond = [
        (np.abs(keys) > 128 * own.keys.reshape(keys.shape[0], 1, -1)).mean()
        for own, keys in zip(scales.of("int8"), held.keys, strict=True)
    ]
    assert max(beyond) < 0.002
