"""From a model's name to its files on this machine: the catalog, the hub, its cache, and the user's converted models.

`resolve` is what loading asks. The files below it: names (`ids`), what is here (`cache`, `folder`), what the hub has
(`download`, `gguf_offers`, `search`), and the process that fetches and converts (`conversion`). Nothing is imported
before it is used: what loads a model that is here needs little of it.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgeinfer.hub.cache import (
        BUILTIN,
        CachedModel,
        builtin,
        cached,
        cached_models,
        is_bundle,
        is_checkpoint,
        remove_cached,
    )
    from edgeinfer.hub.catalog_models import CatalogModel, catalog, catalog_model
    from edgeinfer.hub.download import pull
    from edgeinfer.hub.folder import Converted, converted_models, models_folder, remove_converted
    from edgeinfer.hub.gguf_offers import Offer, offers
    from edgeinfer.hub.last_use import last_uses, note_use
    from edgeinfer.hub.placing import Place, find_place, places, shown_name
    from edgeinfer.hub.resolving import find, find_checkpoint, local, resolve, update
    from edgeinfer.hub.search import FoundModel, search_hub

__all__ = [
    "BUILTIN",
    "CachedModel",
    "CatalogModel",
    "Converted",
    "FoundModel",
    "Offer",
    "Place",
    "builtin",
    "cached",
    "cached_models",
    "catalog",
    "catalog_model",
    "converted_models",
    "find",
    "find_checkpoint",
    "find_place",
    "is_bundle",
    "is_checkpoint",
    "last_uses",
    "local",
    "models_folder",
    "note_use",
    "offers",
    "places",
    "pull",
    "remove_cached",
    "remove_converted",
    "resolve",
    "search_hub",
    "shown_name",
    "update",
]

_HOMES = {
    "BUILTIN": "cache",
    "CachedModel": "cache",
    "CatalogModel": "catalog_models",
    "Converted": "folder",
    "FoundModel": "search",
    "Offer": "gguf_offers",
    "Place": "placing",
    "builtin": "cache",
    "cached": "cache",
    "cached_models": "cache",
    "catalog": "catalog_models",
    "catalog_model": "catalog_models",
    "converted_models": "folder",
    "find": "resolving",
    "find_checkpoint": "resolving",
    "find_place": "placing",
    "is_bundle": "cache",
    "is_checkpoint": "cache",
    "last_uses": "last_use",
    "local": "resolving",
    "models_folder": "folder",
    "note_use": "last_use",
    "offers": "gguf_offers",
    "places": "placing",
    "pull": "download",
    "remove_cached": "cache",
    "remove_converted": "folder",
    "resolve": "resolving",
    "search_hub": "search",
    "shown_name": "placing",
    "update": "resolving",
}

if not TYPE_CHECKING:  # with this, type checkers would take every name for one of ours

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'edgeinfer.hub' has no attribute {name!r}")
        return getattr(_import_module(f"edgeinfer.hub.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
