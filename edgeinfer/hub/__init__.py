"""From a model's name to its files on this machine: the catalog, the hub, its cache, and the user's converted models.

Loading calls `resolve`. It uses names (`ids`), models on this machine (`cache`, `folder`, `placing`), the hub's offers
(`download`, `catalog_models`), and the process that fetches and converts (`conversion`). Modules are imported when they
are first used, as loading a model that is on this machine needs few of them.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgeinfer.hub.cache import (
        BUILTIN,
        CachedModel,
        builtin,
        cached_models,
        is_bundle,
        is_checkpoint,
        last_uses,
        note_use,
        remove_cached,
    )
    from edgeinfer.hub.catalog_models import CatalogModel, FoundModel, catalog, catalog_model, search_hub
    from edgeinfer.hub.download import Offer, offers, pull
    from edgeinfer.hub.folder import Converted, converted_models, models_folder, remove_converted
    from edgeinfer.hub.placing import Place, places, shown_name
    from edgeinfer.hub.resolving import (
        find,
        find_checkpoint,
        find_model,
        refusal,
        resolve,
        runs_gguf,
        update,
    )

__all__ = [
    "BUILTIN", "CachedModel", "CatalogModel", "Converted", "FoundModel", "Offer", "Place", "builtin",
    "cached_models", "catalog", "catalog_model", "converted_models", "find", "find_checkpoint", "find_model",
    "is_bundle", "is_checkpoint", "last_uses", "models_folder", "note_use", "offers", "places",
    "pull", "refusal", "remove_cached", "remove_converted", "resolve", "runs_gguf", "search_hub", "shown_name",
    "update",
]  # fmt: skip

# Where each name is defined; the module is imported when the name is first used.
_NAMES = {
    "cache": ("BUILTIN CachedModel builtin cached_models is_bundle is_checkpoint last_uses note_use remove_cached"),
    "catalog_models": "CatalogModel FoundModel catalog catalog_model search_hub",
    "download": "Offer offers pull",
    "folder": "Converted converted_models models_folder remove_converted",
    "placing": "Place places shown_name",
    "resolving": "find find_checkpoint find_model refusal resolve runs_gguf update",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # with this, type checkers would take every name for one of ours

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'edgeinfer.hub' has no attribute {name!r}")
        return getattr(_import_module(f"edgeinfer.hub.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
