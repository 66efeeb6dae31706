"""From a model's name to its files on this machine: the catalog, the hub, its cache, and the user's converted models.

`resolve` is what loading asks. The files below it: names (`ids`), what is here (`cache`, `folder`), what the hub has
(`download`, `gguf_offers`, `search`), and the process that fetches and converts (`conversion`).
"""

from __future__ import annotations

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
from edgeinfer.hub.resolving import find, find_checkpoint, local, resolve, update
from edgeinfer.hub.search import FoundModel, search_hub

__all__ = [
    "BUILTIN",
    "CachedModel",
    "CatalogModel",
    "Converted",
    "FoundModel",
    "Offer",
    "builtin",
    "cached",
    "cached_models",
    "catalog",
    "catalog_model",
    "converted_models",
    "find",
    "find_checkpoint",
    "is_bundle",
    "is_checkpoint",
    "last_uses",
    "local",
    "models_folder",
    "note_use",
    "offers",
    "pull",
    "remove_cached",
    "remove_converted",
    "resolve",
    "search_hub",
    "update",
]
