"""Loads the model of a command, with a bar where that takes long; knows nothing of what the command does with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import edgeinfer
from edgeinfer.apps.cli.output import progress_bar

if TYPE_CHECKING:
    from edgeinfer import Model

__all__ = ["load_model"]


def load_model(model: str | None, options: Mapping[str, Any]) -> Model:
    """Loads a model; a bar shows when its weights have to be converted first. Errors as `edgeinfer.load`."""
    with progress_bar() as progress:
        shown: dict[str, Any] = {} if progress is None else {"progress": progress}
        return edgeinfer.load(model, **options, **shown)
