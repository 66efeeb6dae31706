"""What the plan says of weights, in the layout that will run."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from edgeinfer.bundle.layouts import NATIVE, PORTABLE, Layout
from edgeinfer.bundle.store import Bundle
from edgeinfer.config import LoadConfig
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.backends.contract import HEAD_ROWS
from edgeinfer.runtime.loading.registry import choose_backend, kernel_name, make_backend, plan_input_of
from edgeinfer.runtime.planning.candidates import Drafting, configurations
from edgeinfer.runtime.planning.plan import MemoryPlan
from edgeinfer.runtime.planning.planner import make_plan, speed_model
from edgeinfer.runtime.profile.device_profile import DeviceProfile
from edgeinfer.runtime.speculation.option_bytes import OPTION_BYTES
from tests.runtime.models import bundle_of
from tests.tables import each_row


def export(layout: Layout, *, bits: int = 4, keep_small: bool = False) -> Bundle:
    return bundle_of("llama-tied", ExportConfig(bits=bits, keep_small=keep_small, layout=layout))


def planned(bundle: Bundle, layout: Layout | None = None, **options: Any) -> MemoryPlan:
    config = LoadConfig(**options)
    choice = dataclasses.replace(choose_backend(bundle, config), layout=layout or bundle.manifest.layout)
    subject = plan_input_of(choice, config)
    subject = dataclasses.replace(subject, option_bytes=OPTION_BYTES)
    return make_plan(subject, config, speed_model(subject, lambda variant, *, draft_model: DeviceProfile(None)))


def weights(plan: MemoryPlan) -> tuple[int, int]:
    return plan.terms["weights_packed"], plan.terms.get("weights_mapped", 0)


def test_native_weights_are_pages_of_their_file() -> None:
    bundle = export(NATIVE)
    plan = planned(bundle)
    vectors = sum(t.nbytes for t in bundle.manifest.tensors if t.bits == 32)
    assert plan.layout == NATIVE
    # The tied head is the embedding; only float32 is packed, the norms here.
    assert weights(plan) == (vectors, bundle.manifest.weight_bytes)


def test_float_layers_beside_native_ones_are_packed() -> None:
    bundle = export(NATIVE, bits=8, keep_small=True)
    floats = sum(t.nbytes for t in bundle.manifest.tensors if t.bits == 32)
    assert weights(planned(bundle)) == (floats, bundle.manifest.weight_bytes)
    assert floats > 100_000


@each_row("other", [NATIVE, PORTABLE])
def test_a_plan_follows_the_layout_that_runs(other: Layout) -> None:
    native, portable = (export(layout) for layout in (NATIVE, PORTABLE))
    plans = [planned(bundle, other) for bundle in (native, portable)]
    assert [plan.layout for plan in plans] == [other, other]
    assert weights(plans[0]) == weights(plans[1])
    assert plans[0].to_dict()["choice"]["layout"] == other


def test_portable_weights_are_packed_but_for_the_embedding() -> None:
    bundle = export(PORTABLE)
    packed, mapped = weights(planned(bundle))
    embed = bundle.manifest.tensor("embed").nbytes
    # Rows of the embedding that were looked up are dropped before they become more than some megabytes.
    assert packed > bundle.manifest.weight_bytes - embed > 0
    assert mapped == min(embed, 8 << 20)


def test_a_draft_takes_a_few_rows_of_logits_where_the_head_runs_apart() -> None:
    bundle = export(NATIVE)
    vocabulary, width = bundle.manifest.geometry.vocab_size, bundle.manifest.geometry.hidden_size

    def drafting(most: int, layout: Layout = NATIVE, **options: Any) -> int:
        return planned(bundle, layout, speculation="copy", draft_max=most, **options).terms["drafting"]

    # Of longer drafts the states are three times there: twice in the pass, and for the head.
    assert drafting(15) - drafting(HEAD_ROWS - 1) == 4 * 3 * 12 * width
    whole = 4 * 12 * (2 * width + vocabulary)
    assert drafting(15, PORTABLE) - drafting(HEAD_ROWS - 1, PORTABLE) == whole
    for options in ({"weights": "streamed"}, {"parallel": 2}):
        assert drafting(15, **options) - drafting(HEAD_ROWS - 1, **options) == whole


def test_the_largest_pass_may_be_that_over_a_draft() -> None:
    bundle = export(NATIVE)

    def activations(**options: Any) -> int:
        return planned(bundle, speculation="copy", **options).terms["activations"]

    assert activations(prefill_chunk=8, draft_max=15) == activations(prefill_chunk=16, draft_max=15)
    assert activations(prefill_chunk=8, draft_max=7) < activations(prefill_chunk=16, draft_max=7)


def test_a_further_reply_takes_a_row_of_the_largest_pass() -> None:
    bundle = export(NATIVE)

    def further(chunk: int) -> int:
        plan = planned(bundle, prefill_chunk=chunk, speculation="copy", draft_max=15, parallel=2)
        return plan.terms["sequences"]

    assert further(8) == further(16)


def test_the_reference_backend_multiplies_everything_out() -> None:
    bundle = export(NATIVE)
    packed, mapped = weights(planned(bundle, backend="reference"))
    assert mapped == 0
    assert packed > 4 * sum(int(np.prod(t.shape)) for t in bundle.manifest.tensors)


@pytest.mark.parametrize("backend", ["onnx", "reference"])
@pytest.mark.parametrize("layout", [NATIVE, PORTABLE])
def test_profiles_go_by_what_multiplies(backend: str, layout: Layout) -> None:
    bundle = export(layout)
    config = LoadConfig(backend=backend, context=16)
    choice = dataclasses.replace(choose_backend(bundle, config), layout=layout)
    configuration = next(configurations(plan_input_of(choice, config), config, (Drafting((), 0, False),)))
    assert make_backend(choice, config, configuration).kernel == kernel_name(choice)
