"""Policies that make room in a full cache, by name, and what each needs."""

from __future__ import annotations

from collections.abc import Callable

from edgeinfer.bundle.spec import DecoderSpec, uncommon_fields
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import Setting, UsageError
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.backends.contract import Backend, KVCache
from edgeinfer.runtime.kv_cache.context_shift.cluster import ClusterPolicy
from edgeinfer.runtime.kv_cache.context_shift.merge import MergePolicy
from edgeinfer.runtime.kv_cache.context_shift.policy import ContextShiftPolicy
from edgeinfer.runtime.kv_cache.context_shift.window import WindowPolicy

# Contexts smaller than this have no room for sinks, latest tokens and something between them.
_LEAST_CONTEXT = 32
# Parts that no policy knows.
_NEVER = ("norm_after_rope", "full_heads", "kv_sources")
_STOP = "Use " + Setting("overflow", "stop")


@dataclass(frozen=True)
class _Kind:
    """A policy's class, memory and needs: layers that can be run one by one, full attention."""

    make: Callable[[Bundle, DecoderSpec, Backend, KVCache], ContextShiftPolicy]
    planned_bytes: Callable[[DecoderSpec, int], int]
    observes: bool
    reorders: bool


# All but "stop", which makes no room: a text then ends where the context does.
POLICIES: dict[str, _Kind] = {
    "window": _Kind(lambda b, spec, n, cache: WindowPolicy(spec, cache), WindowPolicy.planned_bytes, False, False),
    "merge": _Kind(lambda bundle, s, *on: MergePolicy(bundle, *on), MergePolicy.planned_bytes, True, True),
    "cluster": _Kind(lambda b, spec, n, cache: ClusterPolicy(spec, cache), ClusterPolicy.planned_bytes, False, True),
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
    later = uncommon_fields(spec)
    unknown = [name for name in _NEVER if name in later]
    odd = unknown or (later if kind.observes else ())
    if odd:
        message = f"{bundle.path} has {odd[0]}={getattr(spec, odd[0])!r}, which overflow {name!r} does not know."
        raise UsageError(message, _STOP + (", or window." if kind.observes and not unknown else "."))
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
    can = backend.capabilities
    if kind.observes and not (can.layer_skip and can.hidden):
        message = f"The {backend.name} backend cannot run single layers, by which {name!r} observes attention."
        raise UsageError(message, _STOP + ", window or cluster.")
    return kind.make(bundle, spec, backend, cache)


def planned_bytes(name: str, spec: DecoderSpec | None, capacity: int) -> int:
    """Most memory of a policy in a cache of so many tokens, the arrays of a context shift included."""
    return POLICIES[name].planned_bytes(spec, capacity) if name in POLICIES and spec is not None else 0
