"""Methods by name: drafters, verification rules, searches and ways to compute less, each declared in a file of its own.
Methods of the product are found in the modules of a package, one list `METHODS` per module. Methods of research, and
those of other distributions, are entry points, loaded only when an option names them."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from edgeinfer.core.errors import Setting, UsageError
from edgeinfer.core.options import ConfigOption, Range, require, suggestion
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
    options: tuple[ConfigOption, ...] = ()  # its own options, which callers give as `method_options`
    # Its place among methods of its kind; a lower one is asked first, and wins where nothing else decides.
    order: int = 50

    def values(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Its own options with their defaults, out of a reply's `method_options`."""
        return MappingProxyType({each.name: given.get(each.name, each.default) for each in self.options})


def method_option(
    name: str, default: Any, help: str, *, kind: Any = None, low: float | None = None, high: float | None = None
) -> ConfigOption:
    """Declare an option of a method; its type is that of the default unless `kind` says it."""
    kind = type(default) if kind is None else kind
    limits = None if low is None or high is None else Range(low, high, whole=kind is int, optional=default is None)
    return ConfigOption(name, kind, default is None, default, help, limits)


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


def check_method_options(given: Mapping[str, Any], methods: Iterable[DeclaredMethod]) -> dict[str, Any]:
    """The options given, texts turned into numbers; UsageError for one that no chosen method has, or a bad value."""
    methods = list(methods)
    known = {each.name: each for method in methods for each in method.options}
    found = {}
    for name, value in given.items():
        if name not in known:
            of = " and ".join(method.name for method in methods) or "the methods of this reply"
            hint = suggestion(name, known) + (f"Known: {', '.join(known)}." if known else "Leave it out.")
            raise UsageError(f"There is no option {name!r} of {of}.", hint)
        found[name] = value = _converted(known[name], value)
        known[name].check(value)
        require(known[name].type is not Callable or value is None or callable(value), name, value, "a function")
    return found


def _converted(declared: ConfigOption, value: Any) -> Any:
    """A number that a text spells, as commands give it; anything else as it is."""
    if isinstance(value, str) and declared.type in (int, float):
        try:
            return declared.type(value)
        except ValueError:
            return value
    return value
