"""What tests of speculation share: the built-in model, drafters that draft all they can, and what always holds."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest

import edgeinfer
from edgeinfer.core.methods import product_methods
from edgeinfer.core.results import Result, SpeculationUse
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.profile.costs import PassCosts
from edgeinfer.runtime.profile.device_profile import DeviceProfile
from edgeinfer.runtime.speculation import costs as device_costs
from edgeinfer.runtime.speculation.costs import SessionCosts
from edgeinfer.runtime.speculation.drafters.contract import Drafter
from tests.cache import made
from tests.factories import make_checkpoint

BUILTIN = Path(edgeinfer.__file__).parent / "builtin" / "tales"
needs_builtin = pytest.mark.skipif(
    not (BUILTIN / "edgeinfer.json").is_file(), reason="the built-in model has not been made"
)
MODULES = ("eagle", "mtp", "dflash", "hydra-plus")
# Of the drafters, those that a model without experts and heads of its own can have.
DENSE = tuple(
    name for name in product_methods("drafters") if name not in ("experts", "bits-experts", "resident", *MODULES)
)
PROMPT = "Once upon a time there was a little dog. The little dog had a red ball. The little"
# What a reply without drafts does not depend on.
_OF_DRAFTS = ("speculation", "draft_width", "draft_max", "verification")
_replies: WeakKeyDictionary[edgeinfer.Model, dict[str, Result]] = WeakKeyDictionary()


def cheap_costs(drafters: Sequence[Drafter]) -> SessionCosts:
    """Costs of a device where a pass over many rows takes what one takes: whatever can be drafted pays."""
    guesses = {drafter.name: 1e-6 for drafter in drafters}
    return SessionCosts(PassCosts(((1, 1.0), (32, 1.05))), guesses, 1e-6, confirmed=64)


@contextlib.contextmanager
def known_costs(*, kept: bool = False) -> Iterator[None]:
    """Models load without timing anything. What is made up must not be kept for other loads, but for `kept`, where the
    cache is a test's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_costs, "measure_passes", lambda *_, **__: PassCosts(((1, 1e-4), (4096, 2e-4))))
        patch.setattr(device_costs, "measure_guesses", lambda drafter, context: 1e-6)
        patch.setattr(device_costs, "measure_reading", lambda *_: (0, 0.0))
        if not kept:
            patch.setattr(DeviceProfile, "save_costs", lambda profile, costs: None)
        yield


def make_eager(model: edgeinfer.Model) -> edgeinfer.Model:
    """Lets a model's drafters draft as much as may be, and the same each time, whatever was measured."""
    costs = model._parts.speculator._costs
    costs.of = cheap_costs  # type: ignore[method-assign]
    costs._profile = DeviceProfile(None)  # made-up passes are not kept
    return model


def load_eager(bundle: Path | None = None, **options: Any) -> edgeinfer.Model:
    """An eager model that has learnt nothing."""
    with known_costs():
        model = make_eager(edgeinfer.load(bundle, **{"threads": 1} | options))
    edgeinfer.tools.restore_drafting(model, {})
    return model


def plain(model: edgeinfer.Model, prompt: Any = PROMPT, **options: Any) -> Result:
    """What decoding without drafts gives."""
    return model.generate(prompt, **options | {"speculation": "off"})


def check_figures(speculation: SpeculationUse) -> None:
    """What must hold whatever was drafted."""
    s = speculation
    assert s.rounds == s.recovered + s.bonus == sum(s.choices.values())
    assert s.drafted >= s.accepted == sum(s.accepted_per_position)
    assert s.acceptance_rate == (s.accepted / s.drafted if s.drafted else 0)
    uses = s.per_drafter.values()
    assert sum(use.drafted for use in uses) == s.drafted
    assert sum(use.accepted for use in uses) == s.accepted
    places = zip_longest(*(use.accepted_per_position for use in uses), fillvalue=0)
    assert tuple(map(sum, places)) == s.accepted_per_position
    for name, use in s.per_drafter.items():
        assert use.rounds == sum(n for chosen, n in s.choices.items() if name in chosen.split("+"))
        assert use.rounds <= use.drafted >= use.accepted == sum(use.accepted_per_position)
    assert min(s.draft_ms, s.verify_ms, s.overhead_ms) >= 0
    assert (s.verify_ms > 0) == (s.rounds > 0)


def same(model: edgeinfer.Model, speculation: str, **options: Any) -> SpeculationUse:
    """Checks that a reply is plain decoding's, which is asked for once, and its figures."""
    prompt = options.pop("prompt", PROMPT)
    replies = _replies.setdefault(model, {})
    asked = repr((prompt, sorted((name, value) for name, value in options.items() if name not in _OF_DRAFTS)))
    if asked not in replies:
        replies[asked] = plain(model, prompt, **options)
    expected = replies[asked]
    result = model.generate(prompt, speculation=speculation, **options)
    assert (result.text, result.token_ids) == (expected.text, expected.token_ids)
    assert result.finish_reason == expected.finish_reason
    check_figures(result.speculation)
    # No rounds at all where asking drafters costs more than they can save.
    if result.finish_reason == "length" and result.speculation.rounds:
        assert result.speculation.accepted + result.speculation.rounds == len(result.token_ids) - 1
    return result.speculation


def random_bundle(folder: Path, seed: int = 0, **settings: Any) -> Path:
    """A random 4-bit bundle with the tokenizer of tests.factories, and its checkpoint."""
    shutil.copytree(made(_make_random, seed, sorted(settings.items())), folder, dirs_exist_ok=True)
    return folder / "bundle"


def _make_random(folder: Path, seed: int, settings: list[tuple[str, Any]]) -> None:
    make_checkpoint(folder / "checkpoint", "llama", seed=seed, **dict(settings))
    export_checkpoint(
        folder / "checkpoint", folder / "bundle", ExportConfig(bits=4, keep_small=False, calibration="none")
    )
