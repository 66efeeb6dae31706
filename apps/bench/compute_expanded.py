"""Cost-expanded forms of a pair of checkpoints, whose speeds stand beside the pair's own quality; knows no policies.

Both models grow by the same factor, so that what one costs against the other stays as it is. They compute what the
small ones compute: their quality is not measured again.
"""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import replace
from pathlib import Path

from edgeinfer.apps.bench.artifacts import export_command
from edgeinfer.apps.bench.driver import child_environment
from edgeinfer.apps.bench.expand import COST_EXPANDED, expand_checkpoint
from edgeinfer.apps.bench.shapes import Shape
from edgeinfer.apps.bench.trained import TrainedCheckpoint
from edgeinfer.errors import UsageError

__all__ = ["expanded_bundle", "grown"]


def grown(shape: Shape, factor: int) -> Shape:
    """So many times the width, heads and feed-forward columns, and twice the layers; the same vocabulary.

    Raises:
        UsageError: a factor below 2.
    """
    if factor < 2:
        raise UsageError(f"A model cannot be expanded by {factor}.", "Give a factor from 2 on.")
    return replace(
        shape,
        name=f"x{factor}",
        hidden=factor * shape.hidden,
        layers=2 * shape.layers,
        heads=factor * shape.heads,
        ffn=factor * shape.ffn,
    )


def expanded_bundle(checkpoint: Path, factor: int, folder: Path) -> Path:
    """A bundle of the cost-expanded checkpoint in 8 bits, made once and kept.

    Raises:
        CheckpointError, UsageError: it cannot be expanded or exported.
    """
    with (checkpoint / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:8]
    place = folder / f"{checkpoint.name}-{digest}-{COST_EXPANDED}-x{factor}"
    bundle = place / "bundle"
    if not bundle.is_dir():
        grown_shape = grown(TrainedCheckpoint(checkpoint).shape, factor)
        expand_checkpoint(checkpoint, place / "checkpoint", grown_shape)
        command = export_command(place / "checkpoint", bundle, ("--bits", "8", "--no-kv-scales"))
        done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1].removeprefix("error: ")
            raise UsageError(f"{checkpoint.name} cannot be exported: {reason}", "Export it alone to see more.")
    return bundle
