"""What is measured of a model or a device, tuned for it, and learnt from it, beside replies."""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgeinfer.runtime.profile.settings import TunedSettings
    from edgeinfer.runtime.profile.uncertainty import MeasuredUncertainty
    from edgeinfer.runtime.tuning.drafting_search import TuneResult
    from edgeinfer.runtime.tuning.measure import WorkTimes
    from edgeinfer.runtime.tuning.reply_reading import ReplyReading
    from edgeinfer.tools.cache_policies import CacheLoss, CacheTuning, Foreseen, tune_cache
    from edgeinfer.tools.devices import DeviceTuning, PartGain, forget_tuning, list_devices, measure_device, tune_device
    from edgeinfer.tools.drafters import DrafterGain, DraftersTuning, tune_drafters
    from edgeinfer.tools.evaluation import evaluate
    from edgeinfer.tools.judging import JudgeGain, RightReply, read_questions, tune_judge
    from edgeinfer.tools.kv_quality import measure_kv
    from edgeinfer.tools.measuring import (
        drafting_state,
        expert_counts,
        experts_per_token,
        measure_decode,
        measure_passes,
        measure_prefill,
        measure_work,
        pass_work,
        read_reply,
        restore_drafting,
    )
    from edgeinfer.tools.predictions import Divergence, Evaluation
    from edgeinfer.tools.steering import SteeringGain, tune_steering
    from edgeinfer.tools.tuning import EntropyFacts, SkipLevel, tune_drafting, tune_entropy, tune_skips
    from edgeinfer.tools.uncertainty import tune_uncertainty

__all__ = [
    "CacheLoss",
    "CacheTuning",
    "DeviceTuning",
    "Divergence",
    "DrafterGain",
    "DraftersTuning",
    "EntropyFacts",
    "Evaluation",
    "Foreseen",
    "JudgeGain",
    "MeasuredUncertainty",
    "PartGain",
    "ReplyReading",
    "RightReply",
    "SkipLevel",
    "SteeringGain",
    "TuneResult",
    "TunedSettings",
    "WorkTimes",
    "drafting_state",
    "evaluate",
    "expert_counts",
    "experts_per_token",
    "forget_tuning",
    "list_devices",
    "measure_decode",
    "measure_device",
    "measure_kv",
    "measure_passes",
    "measure_prefill",
    "measure_work",
    "pass_work",
    "read_questions",
    "read_reply",
    "restore_drafting",
    "tune_cache",
    "tune_device",
    "tune_drafters",
    "tune_drafting",
    "tune_entropy",
    "tune_judge",
    "tune_skips",
    "tune_steering",
    "tune_uncertainty",
]

_HOMES = {
    "CacheLoss": "cache_policies",
    "CacheTuning": "cache_policies",
    "DeviceTuning": "devices",
    "Divergence": "predictions",
    "DrafterGain": "drafters",
    "DraftersTuning": "drafters",
    "EntropyFacts": "tuning",
    "Evaluation": "predictions",
    "Foreseen": "cache_policies",
    "JudgeGain": "judging",
    "MeasuredUncertainty": "uncertainty",
    "PartGain": "devices",
    "ReplyReading": "measuring",
    "RightReply": "judging",
    "SkipLevel": "tuning",
    "SteeringGain": "steering",
    "TuneResult": "tuning",
    "TunedSettings": "devices",
    "WorkTimes": "measuring",
    "drafting_state": "measuring",
    "evaluate": "evaluation",
    "expert_counts": "measuring",
    "experts_per_token": "measuring",
    "forget_tuning": "devices",
    "list_devices": "devices",
    "measure_decode": "measuring",
    "measure_device": "devices",
    "measure_kv": "kv_quality",
    "measure_passes": "measuring",
    "measure_prefill": "measuring",
    "measure_work": "measuring",
    "pass_work": "measuring",
    "read_questions": "judging",
    "read_reply": "measuring",
    "restore_drafting": "measuring",
    "tune_cache": "cache_policies",
    "tune_device": "devices",
    "tune_drafters": "drafters",
    "tune_drafting": "tuning",
    "tune_entropy": "tuning",
    "tune_judge": "judging",
    "tune_skips": "tuning",
    "tune_steering": "steering",
    "tune_uncertainty": "uncertainty",
}

# What calibrated caches, which has no successor: a call of it is to be removed.
_GONE = ("calibrate_kv", "tune_kv")

if not TYPE_CHECKING:  # with this, type checkers would take every name for one of ours

    def __getattr__(name: str) -> object:
        if name in _GONE:
            raise AttributeError(f"{name} is gone, as KV caches need no calibration: load a model with kv='int8'.")
        if name not in _HOMES:
            raise AttributeError(f"module 'edgeinfer.tools' has no attribute {name!r}")
        return getattr(_import_module(f"edgeinfer.tools.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
