"""Methods by name: drafters, verification rules, searches and ways to compute less, each declared in a file of its own.
Methods of the product are found in the modules of a package, one list `METHODS` per module. Methods of research, and
those of other distributions, are entry points, loaded only when an option names them."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from edgeinfer.core.errors import Setting, UsageError
from edgeinfer.core.options import suggestion
from edgeinfer.core.records import dataclass

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class _Kind(NamedTuple):
    package: str  # whose modules declare the product's methods
    noun: str
    option: str  # chooses one
    without: str = ""  # values of the option for none


KINDS: Mapping[str, _Kind] = {
    "drafters": _Kind("edgeinfer.runtime.speculation.drafters", "drafter", "speculation", "auto, off, "),
    "verifiers": _Kind("edgeinfer.runtime.speculation.verification", "verification", "verification"),
    "searches": _Kind("edgeinfer.runtime.search", "search", "search", "off, "),
    "compute": _Kind("edgeinfer.runtime.layer_skip", "compute", "compute", "full, "),
}


_NO_ENTRIES = ". Methods of research are not registered: install edgeinfer again to have them."


@dataclass(frozen=True, kw_only=True)
class DeclaredMethod:
    """What every kind of method declares; each kind adds how it is made, when "auto" takes it and what it needs."""

    name: str
    help: str = ""  # one line for people
    # Its place among methods of its kind; a lower one is asked first, and wins where nothing else decides.
    order: int = 50


@cache
def product_methods(kind: str) -> Mapping[str, DeclaredMethod]:
    """The product's methods of a kind by name, in their order."""
    package = import_module(KINDS[kind].package)
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    modules = [import_module(f"{package.__name__}.{name}") for name in names]
    found: list[DeclaredMethod] = [method for module in modules for method in getattr(module, "METHODS", ())]
    return {method.name: method for method in sorted(found, key=lambda method: method.order)}


def research_entries(kind: str) -> Mapping[str, EntryPoint]:
    """The entry points of methods that are not part of the product, by name."""
    from importlib.metadata import entry_points  # few replies name a method of research

    return {entry.name: entry for entry in entry_points(group=f"edgeinfer.{kind}")}


def research_methods(kind: str) -> Mapping[str, DeclaredMethod]:
    """Load all methods of a kind that are not part of the product."""
    return {name: _loaded(entry) for name, entry in research_entries(kind).items()}


def find_method(kind: str, name: str) -> DeclaredMethod:
    """The method of a kind and name; UsageError where there is none."""
    if name in (product := product_methods(kind)):
        return product[name]
    entries = research_entries(kind)
    if name in entries:
        return _loaded(entries[name])
    choices = (*product, *entries)
    hint = (
        suggestion(name, choices) + Setting(KINDS[kind].option) + f" can be {KINDS[kind].without}{', '.join(product)}"
    )
    hint += f"; or of research {', '.join(entries)}." if entries else _NO_ENTRIES
    raise UsageError(f"Unknown {KINDS[kind].noun} {name!r}.", hint)


@cache
def _loaded(entry: EntryPoint) -> DeclaredMethod:
    found = entry.load()
    assert isinstance(found, DeclaredMethod), f"{entry.value} declares a method"
    return found
