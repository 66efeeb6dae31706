"""The bits of a bundle's weights as a table and as data."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from edgeinfer.bundle.manifest import Manifest
from edgeinfer.bundle.plan_record import PlannedTensor
from edgeinfer.config import format_size

PLAN_HEADER = ("matrices", "bits", "size", "predicted divergence")
_NUMBER = re.compile(r"\.\d+(?=\.)")


def plan_rows(manifest: Manifest) -> list[tuple[str, ...]]:
    """Makes a row per projection: how many of its matrices have which bits, their size and, if known, the predicted
    loss."""
    if manifest.plan is None:
        return []
    sizes = {tensor.name: tensor.nbytes for tensor in manifest.tensors}
    rows = []
    for projection, members in _projections(manifest).items():
        size = sum(sizes.get(member.name, 0) for member in members)
        rows.append((projection, _counted(members), format_size(size) if size else "", _cost(members)))
    total = manifest.plan.predicted_kl
    if total is None:
        return [row[:3] for row in rows]
    return [*rows, ("all", "", format_size(manifest.weight_bytes), f"{total:.4g}")]


def plan_facts(manifest: Manifest) -> dict[str, Any] | None:
    """Summarizes the plan of bits; the manifest has each matrix."""
    plan = manifest.plan
    if plan is None:
        return None
    types = {tensor.name: tensor.type for tensor in plan.tensors if tensor.type}
    return {
        "method": plan.method,
        "budget_bytes": plan.budget_bytes,
        "weight_bytes": manifest.weight_bytes,
        "bits_per_weight": manifest.bits_per_weight,
        "predicted_kl": plan.predicted_kl,
        "bits": {tensor.name: tensor.bits for tensor in plan.tensors},
    } | ({"types": types} if types else {})


def _projections(manifest: Manifest) -> dict[str, list[PlannedTensor]]:
    found: dict[str, list[PlannedTensor]] = {}
    assert manifest.plan is not None
    for tensor in manifest.plan.tensors:
        found.setdefault(_NUMBER.sub(".*", tensor.name), []).append(tensor)
    return found


def _counted(members: list[PlannedTensor]) -> str:
    """Counts the matrices by bits: `4 (20), 8 (4)`, or which types of llama.cpp's."""
    counts = Counter((member.bits, member.type) for member in members)
    return ", ".join(f"{kind or bits} ({count})" for (bits, kind), count in sorted(counts.items()))


def _cost(members: list[PlannedTensor]) -> str:
    costs = [member.predicted_kl for member in members if member.predicted_kl is not None]
    return f"{sum(costs):.4g}" if costs else ""
