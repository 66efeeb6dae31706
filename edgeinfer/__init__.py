"""The public face of edgeinfer; nothing is imported before it is used, so `import edgeinfer` stays light."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from edgeinfer.version import VERSION

if TYPE_CHECKING:
    from edgeinfer.api import MemoryPlan, Model, TokenStream, TuneResult, load, plan
    from edgeinfer.chat import Chat
    from edgeinfer.config import GenerationConfig, LoadConfig
    from edgeinfer.errors import EdgeInferError
    from edgeinfer.hub import CatalogModel, FoundModel, Offer, catalog, offers, search_hub
    from edgeinfer.installed import LocalModel, list_models, pull, remove_model
    from edgeinfer.model_facts import ModelFacts, describe, verify
    from edgeinfer.results import Chunk, Result
    from edgeinfer.tools.devices import DeviceTuning, forget_tuning, list_devices, measure_device, tune_device
    from edgeinfer.tools.evaluation import evaluate
    from edgeinfer.tools.kv_calibration import calibrate_kv, measure_kv, tune_kv
    from edgeinfer.tools.predictions import Divergence, Evaluation

__all__ = [
    "CatalogModel",
    "Chat",
    "Chunk",
    "DeviceTuning",
    "Divergence",
    "EdgeInferError",
    "Evaluation",
    "FoundModel",
    "GenerationConfig",
    "LoadConfig",
    "LocalModel",
    "MemoryPlan",
    "Model",
    "ModelFacts",
    "Offer",
    "Result",
    "TokenStream",
    "TuneResult",
    "calibrate_kv",
    "catalog",
    "describe",
    "evaluate",
    "forget_tuning",
    "list_devices",
    "list_models",
    "load",
    "measure_device",
    "measure_kv",
    "offers",
    "plan",
    "pull",
    "remove_model",
    "search_hub",
    "tune_device",
    "tune_kv",
    "verify",
]
__version__ = VERSION

# onnxruntime 1.31 reports events to its makers and writes an identifier of the device into the user's cache, beginning
# with its import, unless this is set. Whoever has set it otherwise has decided for themselves.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

_HOMES = {
    "CatalogModel": "hub",
    "Chat": "chat",
    "Chunk": "results",
    "DeviceTuning": "tools.devices",
    "Divergence": "tools.predictions",
    "EdgeInferError": "errors",
    "Evaluation": "tools.predictions",
    "FoundModel": "hub",
    "GenerationConfig": "config",
    "LoadConfig": "config",
    "LocalModel": "installed",
    "MemoryPlan": "api",
    "Model": "api",
    "ModelFacts": "model_facts",
    "Offer": "hub",
    "Result": "results",
    "TokenStream": "api",
    "TuneResult": "api",
    "calibrate_kv": "tools.kv_calibration",
    "catalog": "hub",
    "describe": "model_facts",
    "evaluate": "tools.evaluation",
    "forget_tuning": "tools.devices",
    "list_devices": "tools.devices",
    "list_models": "installed",
    "load": "api",
    "measure_device": "tools.devices",
    "measure_kv": "tools.kv_calibration",
    "offers": "hub",
    "plan": "api",
    "pull": "installed",
    "remove_model": "installed",
    "search_hub": "hub",
    "tune_device": "tools.devices",
    "tune_kv": "tools.kv_calibration",
    "verify": "model_facts",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'edgeinfer' has no attribute {name!r}")
    return getattr(import_module(f"edgeinfer.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
