"""The public face of edgeinfer; nothing is imported before it is used, so `import edgeinfer` stays light."""

from __future__ import annotations

import gc as _gc
import os as _os
from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from edgeinfer.core.version import VERSION as _VERSION

if TYPE_CHECKING:
    from edgeinfer import tools
    from edgeinfer.api import aload, load, plan
    from edgeinfer.async_replies import AsyncTokenStream
    from edgeinfer.batching import ReplyBatch
    from edgeinfer.chat import Chat
    from edgeinfer.context_model import ContextModel
    from edgeinfer.core.contexts import Context
    from edgeinfer.core.errors import (
        AdapterError,
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
        RemoteError,
        StorageError,
        TemplateError,
        TokenizerError,
        UnshareableError,
        UnsupportedArchitectureError,
        UsageError,
        UserError,
    )
    from edgeinfer.core.options.decoding import ReducedCompute, Search, Speculation
    from edgeinfer.core.options.load import Cache, LoadOptions
    from edgeinfer.core.options.reply import ReplyOptions, Sampling
    from edgeinfer.core.options.types import LoadDict, ReplyDict
    from edgeinfer.core.results import Chunk, Result
    from edgeinfer.generation import TokenStream
    from edgeinfer.hub import CatalogModel, FoundModel, Offer, catalog, offers, search_hub
    from edgeinfer.installed import LocalModel, ModelFacts, describe, list_models, pull, remove_model, verify
    from edgeinfer.model import Model
    from edgeinfer.runtime.planning.plan import MemoryPlan
    from edgeinfer.tools import evaluate, list_devices
    from edgeinfer.verification_round import VerificationStream

__all__ = [
    "AdapterError", "AsyncTokenStream", "BackendError", "BudgetError", "BundleError", "Cache", "CapabilityError",
    "CatalogModel", "Chat", "CheckpointError", "Chunk", "Context", "ContextLengthError", "ContextModel", "DeviceError",
    "EdgeInferError", "FoundModel", "GrammarError", "HubError", "InternalError", "LoadDict", "LoadOptions",
    "LocalModel", "MemoryPlan", "Model", "ModelError", "ModelFacts", "NativeUnavailableError", "Offer", "PromptError",
    "ReducedCompute", "RemoteError", "ReplyBatch", "ReplyDict", "ReplyOptions", "Result", "Sampling", "Search",
    "Speculation", "StorageError", "TemplateError", "TokenStream", "TokenizerError", "UnshareableError",
    "UnsupportedArchitectureError", "UsageError", "UserError", "VerificationStream", "aload", "catalog", "describe",
    "evaluate", "list_devices", "list_models", "load", "offers", "plan", "pull", "remove_model", "search_hub", "tools",
    "verify",
]  # fmt: skip
__version__ = _VERSION

# onnxruntime 1.31 reports events to its makers and writes an identifier of the device into the user's cache, beginning
# with its import, unless this is set. Whoever has set it otherwise has decided for themselves.
_os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# The module of each name.
_NAMES = {
    "api": "aload load plan",
    "async_replies": "AsyncTokenStream",
    "batching": "ReplyBatch",
    "chat": "Chat",
    "context_model": "ContextModel",
    "core.contexts": "Context",
    "core.errors": (
        "AdapterError BackendError BudgetError BundleError CapabilityError CheckpointError ContextLengthError "
        "DeviceError EdgeInferError GrammarError HubError InternalError ModelError NativeUnavailableError "
        "PromptError RemoteError StorageError TemplateError TokenizerError UnshareableError "
        "UnsupportedArchitectureError UsageError UserError"
    ),
    "hub": "CatalogModel FoundModel Offer catalog offers search_hub",
    "installed": "LocalModel ModelFacts describe list_models pull remove_model verify",
    "core.options.decoding": "ReducedCompute Search Speculation",
    "core.options.load": "Cache LoadOptions",
    "core.options.reply": "ReplyOptions Sampling",
    "core.options.types": "LoadDict ReplyDict",
    "core.results": "Chunk Result",
    "model": "MemoryPlan Model TokenStream VerificationStream",
    "tools": "evaluate list_devices",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def _imported(module: str) -> object:
    """A module and all that it brings. Hundreds of modules leave no garbage, and looking for it while they are imported
    takes a tenth of the time."""
    collects = _gc.isenabled()
    _gc.disable()
    try:
        return _import_module(module)
    finally:
        if collects:
            _gc.enable()


if not TYPE_CHECKING:  # with this, type checkers would take every name for one of ours

    def __getattr__(name: str) -> object:
        if name == "tools":
            return _imported("edgeinfer.tools")
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'edgeinfer' has no attribute {name!r}")
        return getattr(_imported(f"edgeinfer.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
