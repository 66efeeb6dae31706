"""Fixtures of the public face that the command's tests share."""

from __future__ import annotations

from tests.edgeinfer.conftest import bigrams, brisk, cache, loaded, model, short_drafter, small_bundle, told_costs

__all__ = ["bigrams", "brisk", "cache", "loaded", "model", "short_drafter", "small_bundle", "told_costs"]
