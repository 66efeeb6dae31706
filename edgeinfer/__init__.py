"""The public face of edgeinfer; nothing is imported before it is used, so `import edgeinfer` stays light."""

from __future__ import annotations

import os as _os
from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from edgeinfer.version import VERSION as _VERSION

if TYPE_CHECKING:
    from edgeinfer.adaptive import ReducedCompute
    from edgeinfer.api import MemoryPlan, Model, TokenStream, TuneResult, aload, load, plan
    from edgeinfer.async_replies import AsyncTokenStream
    from edgeinfer.chat import Chat
    from edgeinfer.config import Cache, GenerationConfig, LoadConfig
    from edgeinfer.drafting import Speculation
    from edgeinfer.errors import (
        BackendError,
        BudgetError,
        BundleError,
        CapabilityError,
        CheckpointError,
        ContextLengthError,
        DeviceError,
        EdgeInferError,
        GrammarError,
        HubError,
        InternalError,
        ModelError,
        NativeUnavailableError,
        PromptError,
        StorageError,
        TemplateError,
        TokenizerError,
        UnsupportedArchitectureError,
        UsageError,
        UserError,
    )
    from edgeinfer.hub import CatalogModel, FoundModel, Offer, catalog, offers, search_hub
    from edgeinfer.installed import LocalModel, list_models, pull, remove_model
    from edgeinfer.model_facts import ModelFacts, describe, verify
    from edgeinfer.reply_options import Sampling
    from edgeinfer.results import Chunk, Result
    from edgeinfer.searching import Search
    from edgeinfer.tools.devices import DeviceTuning, forget_tuning, list_devices, measure_device, tune_device
    from edgeinfer.tools.evaluation import evaluate
    from edgeinfer.tools.kv_calibration import calibrate_kv, measure_kv, tune_kv
    from edgeinfer.tools.predictions import Divergence, Evaluation

__all__ = [
    "AsyncTokenStream",
    "BackendError",
    "BudgetError",
    "BundleError",
    "Cache",
    "CapabilityError",
    "CatalogModel",
    "Chat",
    "CheckpointError",
    "Chunk",
    "ContextLengthError",
    "DeviceError",
    "DeviceTuning",
    "Divergence",
    "EdgeInferError",
    "Evaluation",
    "FoundModel",
    "GenerationConfig",
    "GrammarError",
    "HubError",
    "InternalError",
    "LoadConfig",
    "LocalModel",
    "MemoryPlan",
    "Model",
    "ModelError",
    "ModelFacts",
    "NativeUnavailableError",
    "Offer",
    "PromptError",
    "ReducedCompute",
    "Result",
    "Sampling",
    "Search",
    "Speculation",
    "StorageError",
    "TemplateError",
    "TokenStream",
    "TokenizerError",
    "TuneResult",
    "UnsupportedArchitectureError",
    "UsageError",
    "UserError",
    "aload",
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
__version__ = _VERSION

# onnxruntime 1.31 reports events to its makers and writes an identifier of the device into the user's cache, beginning
# with its import, unless this is set. Whoever has set it otherwise has decided for themselves.
_os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

_HOMES = {
    "AsyncTokenStream": "async_replies",
    "BackendError": "errors",
    "BudgetError": "errors",
    "BundleError": "errors",
    "Cache": "config",
    "CapabilityError": "errors",
    "CatalogModel": "hub",
    "Chat": "chat",
    "CheckpointError": "errors",
    "Chunk": "results",
    "ContextLengthError": "errors",
    "DeviceError": "errors",
    "DeviceTuning": "tools.devices",
    "Divergence": "tools.predictions",
    "EdgeInferError": "errors",
    "Evaluation": "tools.predictions",
    "FoundModel": "hub",
    "GenerationConfig": "config",
    "GrammarError": "errors",
    "HubError": "errors",
    "InternalError": "errors",
    "LoadConfig": "config",
    "LocalModel": "installed",
    "MemoryPlan": "api",
    "Model": "api",
    "ModelError": "errors",
    "ModelFacts": "model_facts",
    "NativeUnavailableError": "errors",
    "Offer": "hub",
    "PromptError": "errors",
    "ReducedCompute": "adaptive",
    "Result": "results",
    "Sampling": "reply_options",
    "Search": "searching",
    "Speculation": "drafting",
    "StorageError": "errors",
    "TemplateError": "errors",
    "TokenStream": "api",
    "TokenizerError": "errors",
    "TuneResult": "api",
    "UnsupportedArchitectureError": "errors",
    "UsageError": "errors",
    "UserError": "errors",
    "aload": "api",
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


if not TYPE_CHECKING:  # with this, type checkers would take every name for one of ours

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'edgeinfer' has no attribute {name!r}")
        return getattr(_import_module(f"edgeinfer.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
