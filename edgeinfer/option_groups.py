"""Options of one subject as one object or mapping, and those of several subjects as flat names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

from edgeinfer.errors import UsageError, shown
from edgeinfer.options import check_options, options_of, suggestion


class OptionGroup:
    """Base of frozen dataclasses that hold the options of one subject.

    Attributes:
        mode: of a group with a choice that a text alone can make: its field, and the option's name where options are
            flat.
    """

    mode: ClassVar[tuple[str, str] | None] = None

    def __post_init__(self) -> None:
        check_options(self)

    @classmethod
    def of(cls, given: Self | Mapping[str, Any]) -> Self:
        """Makes the object of what a caller gave.

        Raises:
            UsageError: an option is unknown or out of range, or it is no mapping.
        """
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            kinds = f"a {cls.__name__} or a mapping of its options"
            raise UsageError(f"{shown(given)} cannot be used as {cls.__name__}.", f"Give {kinds}.")
        require_known(f"option of {cls.__name__}", given, options_of(cls))
        return cls(**given)

    def flat(self) -> dict[str, Any]:
        """Those options that differ from their defaults, by the names that they have where options are flat."""
        changed = {
            name: value
            for name, declared in options_of(type(self)).items()
            if (value := getattr(self, name)) != declared.default
        }
        if self.mode is not None and self.mode[0] in changed:
            changed[self.mode[1]] = changed.pop(self.mode[0])
        return changed


def flat_options(given: Mapping[str, Any], groups: Mapping[str, type[OptionGroup]]) -> dict[str, Any]:
    """Options with those of groups in place of the groups; an option that is also given by itself stays as it is."""
    alone = dict(given)
    flat: dict[str, Any] = {}
    for name, group in groups.items():
        value = alone.get(name)
        if value is None:
            alone.pop(name, None)
        elif group.mode is None or not isinstance(value, str):
            flat |= group.of(alone.pop(name)).flat()
    return flat | alone


def require_known(
    kind: str, given: Iterable[str], known: Iterable[str], elsewhere: Mapping[str, str] | None = None
) -> None:
    """Refuses names that are no options.

    Args:
        kind: what they are in messages, such as "load option".
    """
    names = sorted(known)
    for name in given:
        if name not in names:
            hint = (elsewhere or {}).get(name) or suggestion(name, names) or f"Known options: {', '.join(names)}."
            raise UsageError(f"Unknown {kind} {name!r}.", hint.strip())
