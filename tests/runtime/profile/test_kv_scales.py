"""Static scales of older bundles that tuning once kept for a user."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from edgeinfer.bundle import open_bundle, seal
from edgeinfer.bundle.kv_scales import KV_SCALES, read_kv_scales
from edgeinfer.runtime.profile.kv_scales import kept_kv_scales_file, kv_scales
from tests.old_bundle import old_bundle


def test_scales_kept_for_an_older_bundle_are_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bundle = open_bundle(old_bundle(tmp_path / "old"))
    own = read_kv_scales(bundle)
    assert own is not None and kv_scales(bundle) is not None
    written = (bundle.path / KV_SCALES).read_bytes()
    (bundle.path / KV_SCALES).unlink()
    seal(bundle.path, bundle.manifest)
    without = open_bundle(bundle.path)
    assert kv_scales(without) is None
    path = kept_kv_scales_file(without)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(written)
    found = kv_scales(without)
    assert found is not None and found.digest("int4") == own.digest("int4")
    for damage in (b"{", b"[]", b"{}", b"\xff", b"[" * 100_000, b" " * 10**6):
        path.write_bytes(damage)
        with caplog.at_level(logging.WARNING):
            assert kv_scales(without) is None
        assert "cannot be read and is discarded" in caplog.text and not path.exists()
        caplog.clear()
