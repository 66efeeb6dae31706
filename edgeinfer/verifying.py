"""Comparing all files of a model with their digests when somebody asks; knows nothing of loading it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgeinfer.bundle import open_bundle
from edgeinfer.errors import UsageError
from edgeinfer.hub import resolve
from edgeinfer.runtime.weights.verification import Outcome, accept_file, check_file, files_of
from edgeinfer.runtime.weights.verified_files import VerifiedFiles

__all__ = ["verify"]


def verify(
    model: str | Path | None = None,
    *,
    accept: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Outcome]:
    """Reads every file of a model and compares it with its digest; a plain GGUF file, with what it was at first use.

    Args:
        model: as `edgeinfer.load` takes it.
        accept: takes a plain GGUF file as the right one from now on.
        progress: called with a file's name, how many are done and how many there are.

    Returns:
        By the file's name, "now" where it matches, "first" where it is taken as the right one.

    Raises:
        BundleError: a file is damaged or missing.
        UsageError: `accept`, and the files come with digests.
    """
    bundle = open_bundle(resolve(model))
    notes, checks = VerifiedFiles(), files_of([bundle])
    found: dict[str, Outcome] = {}
    for index, check in enumerate(checks):
        if progress is not None:
            progress(check.name, index, len(checks))
        if accept and check.sha256 is not None:
            raise UsageError(f"{check.path} comes with a digest, which it has to match.", "Leave out --accept.")
        found[check.name] = accept_file(check, notes) if accept else check_file(check, notes, again=True)
    return found
