"""Policies that make room in a full cache, by name, and what each needs."""

from __future__ import annotations

from collections.abc import Callable

from edgeinfer.bundle.spec import DecoderSpec, uncommon_fields
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import Setting, UsageError
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.backends.contract import Backend, KVCache
from edgeinfer.runtime.kv_cache.context_shift.cluster import ClusterPolicy
from edgeinfer.runtime.kv_cache.context_shift.policy import ContextShiftPolicy
from edgeinfer.runtime.kv_cache.context_shift.window import WindowPolicy

# Contexts smaller than this have no room for sinks, latest tokens and something between them.
_LEAST_CONTEXT = 32
# Parts that no policy knows.
_NEVER = ("norm_after_rope", "full_heads", "kv_sources")
_STOP = "Use " + Setting("overflow", "stop")


@dataclass(frozen=True)
class _Kind:
    """A policy's class and memory, and whether it reorders rows, which takes full attention."""

    make: Callable[[DecoderSpec, KVCache], ContextShiftPolicy]
    planned_bytes: Callable[[DecoderSpec, int], int]
    reorders: bool


# All but "stop", which makes no room: a text then ends where the context does.
POLICIES: dict[str, _Kind] = {
    "window": _Kind(WindowPolicy, WindowPolicy.planned_bytes, False),
    "cluster": _Kind(ClusterPolicy, ClusterPolicy.planned_bytes, True),
}


def make_context_shift(name: str, bundle: Bundle, backend: Backend, cache: KVCache) -> ContextShiftPolicy | None:
    """The policy of this name for a cache of a backend; None for "stop"."""
    if name not in POLICIES:
        return None
    kind, spec = POLICIES[name], bundle.manifest.decoder
    if spec is None:
        message = f"{bundle.path} does not describe how its keys are rotated, which overflow {name!r} needs to know."
        raise UsageError(message, _STOP + ", or a natively exported bundle.")
    if spec.mixers:
        message = f"{bundle.path} has recurrent layers, whose state cannot forget tokens as overflow {name!r} would."
        raise UsageError(message, _STOP + ".")
    if spec.latent is not None and kind.reorders:
        message = f"{bundle.path} has latent attention, whose rows overflow {name!r} does not know."
        raise UsageError(message, _STOP + ", or window.")
    if odd := [part for part in uncommon_fields(spec) if part in _NEVER]:
        message = f"{bundle.path} has {odd[0]}={getattr(spec, odd[0])!r}, which overflow {name!r} does not know."
        raise UsageError(message, _STOP + ".")
    if cache.capacity < _LEAST_CONTEXT:
        message = f"Overflow {name!r} needs a context of at least {_LEAST_CONTEXT} tokens, not {cache.capacity}."
        raise UsageError(message, _STOP + ", or a larger " + Setting("context") + ".")
    if kind.reorders and not cache.editable:
        message = f"The {backend.name} backend cannot edit rows of its cache, as overflow {name!r} does."
        raise UsageError(message, _STOP + ", or window.")
    if kind.reorders and spec.window_size:
        # Rows that are left stand closer together, so a layer's window would reach tokens that it must not see.
        message = f"Layers of {bundle.path} attend to the last {spec.window_size} tokens, which {name!r} would mix up."
        raise UsageError(message, _STOP + ", or window.")
    return kind.make(spec, cache)


def planned_bytes(name: str, spec: DecoderSpec | None, capacity: int) -> int:
    """Most memory of a policy in a cache of so many tokens, the arrays of a context shift included."""
    return POLICIES[name].planned_bytes(spec, capacity) if name in POLICIES and spec is not None else 0
