"""What the plan says of weights, in the layout that will run."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeinfer.bundle import NATIVE, PORTABLE, Bundle, Layout, open_bundle
from edgeinfer.config import LoadConfig
from edgeinfer.export import ExportConfig, export_checkpoint
from edgeinfer.runtime.plan import MemoryPlan, make_plan
from tests.factories import make_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan") / "tiny"
    make_checkpoint(folder, "llama-tied")
    return folder


def export(checkpoint: Path, out: Path, layout: Layout, *, bits: int = 4, keep_small: bool = False) -> Bundle:
    config = ExportConfig(bits=bits, keep_small=keep_small, layout=layout)
    return open_bundle(export_checkpoint(checkpoint, out, config))


def weights(plan: MemoryPlan) -> tuple[int, int]:
    return plan.terms["weights_packed"], plan.terms["weights_mapped"]


def test_native_weights_are_pages_of_their_file(checkpoint: Path, tmp_path: Path) -> None:
    bundle = export(checkpoint, tmp_path / "out", NATIVE)
    plan = make_plan(bundle, LoadConfig())
    vectors = sum(t.nbytes for t in bundle.manifest.tensors if t.bits == 32)
    assert plan.layout == NATIVE
    # The tied head is the embedding; only float32 is packed, the norms here.
    assert weights(plan) == (vectors, bundle.manifest.weight_bytes)


def test_float_layers_beside_native_ones_are_packed(checkpoint: Path, tmp_path: Path) -> None:
    bundle = export(checkpoint, tmp_path / "out", NATIVE, bits=8, keep_small=True)
    floats = sum(t.nbytes for t in bundle.manifest.tensors if t.bits == 32)
    assert weights(make_plan(bundle, LoadConfig())) == (floats, bundle.manifest.weight_bytes)
    assert floats > 100_000


@pytest.mark.parametrize("other", [NATIVE, PORTABLE])
def test_a_plan_follows_the_layout_that_runs(checkpoint: Path, tmp_path: Path, other: Layout) -> None:
    native, portable = (export(checkpoint, tmp_path / layout, layout) for layout in (NATIVE, PORTABLE))
    plans = [make_plan(bundle, LoadConfig(), other) for bundle in (native, portable)]
    assert [plan.layout for plan in plans] == [other, other]
    assert weights(plans[0]) == weights(plans[1])
    assert plans[0].to_dict()["choice"]["layout"] == other


def test_portable_weights_are_packed_but_for_the_embedding(checkpoint: Path, tmp_path: Path) -> None:
    bundle = export(checkpoint, tmp_path / "out", PORTABLE)
    packed, mapped = weights(make_plan(bundle, LoadConfig()))
    embed = bundle.manifest.tensor("embed").nbytes
    assert packed > bundle.manifest.weight_bytes > mapped > embed
