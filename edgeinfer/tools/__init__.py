"""Tools that measure a model or a device, tune settings, and learn from texts."""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgeinfer.runtime.profile.settings import TunedSettings
    from edgeinfer.runtime.tuning.drafting_search import TuneResult
    from edgeinfer.runtime.tuning.measure import ReplyReading, WorkTimes
    from edgeinfer.tools.cache_policies import CacheLoss, CacheTuning, Foreseen, tune_cache
    from edgeinfer.tools.devices import DeviceTuning, PartGain, forget_tuning, list_devices, measure_device, tune_device
    from edgeinfer.tools.drafters import DrafterGain, DraftersTuning, tune_drafters
    from edgeinfer.tools.evaluation import Divergence, Evaluation, evaluate
    from edgeinfer.tools.measuring import (
        drafting_state,
        expert_counts,
        measure_decode,
        measure_passes,
        measure_prefill,
        measure_work,
        pass_work,
        read_reply,
        restore_drafting,
    )
    from edgeinfer.tools.steering import SteeringGain, tune_steering
    from edgeinfer.tools.tuning import EntropyFacts, SkipLevel, tune_drafting, tune_entropy, tune_skips

__all__ = [
    "CacheLoss", "CacheTuning", "DeviceTuning", "Divergence", "DrafterGain", "DraftersTuning", "EntropyFacts",
    "Evaluation", "Foreseen", "PartGain", "ReplyReading", "SkipLevel", "SteeringGain", "TuneResult", "TunedSettings",
    "WorkTimes", "drafting_state", "evaluate", "expert_counts", "forget_tuning", "list_devices", "measure_decode",
    "measure_device", "measure_passes", "measure_prefill", "measure_work", "pass_work", "read_reply",
    "restore_drafting", "tune_cache", "tune_device", "tune_drafters", "tune_drafting", "tune_entropy",
    "tune_skips", "tune_steering",
]  # fmt: skip

# Where each name is defined; the module is imported when the name is first used.
_NAMES = {
    "cache_policies": "CacheLoss CacheTuning Foreseen tune_cache",
    "devices": "DeviceTuning PartGain TunedSettings forget_tuning list_devices measure_device tune_device",
    "drafters": "DrafterGain DraftersTuning tune_drafters",
    "evaluation": "Divergence Evaluation evaluate",
    "measuring": (
        "ReplyReading WorkTimes drafting_state expert_counts measure_decode measure_passes measure_prefill "
        "measure_work pass_work read_reply restore_drafting"
    ),
    "steering": "SteeringGain tune_steering",
    "tuning": "EntropyFacts SkipLevel TuneResult tune_drafting tune_entropy tune_skips",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # with this, type checkers would take every name for one of ours

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'edgeinfer.tools' has no attribute {name!r}")
        return getattr(_import_module(f"edgeinfer.tools.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
