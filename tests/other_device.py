"""A device of torch for machines that have none: it computes nothing, and finds arrays that lie on the wrong side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

OTHER = torch.device("meta")
# A copy from one device to another is what these are for.
_COPIES = frozenset({torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default})
# An array there may be indexed by one on the CPU; not the other way around.
_INDEXED = frozenset(
    {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten._unsafe_index.Tensor}
)


# What shapes alone do not tell.
_BY_VALUE = frozenset({torch.ops.aten.nonzero.default, torch.ops.aten.equal.default, torch.ops.aten.allclose.default})
# What reads values, which meta tensors have not.
_READS = frozenset(
    {
        torch.Tensor.item,
        torch.Tensor.tolist,
        torch.Tensor.__bool__,
        torch.Tensor.__float__,
        torch.Tensor.__int__,
        torch.Tensor.__index__,
    }
)


@contextmanager
def other_device() -> Iterator[torch.device]:
    """A device that refuses what CUDA refuses; whatever is read from it is ones. Arrays "there" are torch's meta
    tensors: they have shapes and no values, and torch itself is lenient about them. An operator that is given arrays of
    both sides raises RuntimeError."""
    with _Values(), _Sides():  # type: ignore[no-untyped-call]
        yield OTHER


class _Values(TorchFunctionMode):
    """Lets values be read."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _READS and args[0].device == OTHER:
            return func(torch.ones(args[0].shape, dtype=args[0].dtype))
        return func(*args, **(kwargs or {}))


class _Sides(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks where arrays are."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func.overloadpacket is torch.ops.aten.to:  # which inference mode does not take apart
            with self:
                return func.decompose(*args, **given)
        tensors = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, torch.Tensor)]
        there = any(tensor.device == OTHER for tensor in tensors)
        if there and func in _COPIES:
            return self._copied(func, args, given)
        if not there:
            return func(*args, **given)
        self._require_one_side(func, args, tensors)
        masked = func in _INDEXED and any(tensor.dtype == torch.bool for tensor in tensors[1:])
        return _of_ones(func, args, given) if masked or func in _BY_VALUE else func(*args, **given)

    def _copied(self, func: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any]) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args[0], args[1]
            return target.fill_(1) if target.device != OTHER else func(target, torch.empty_like(source, device=OTHER))
        device = given.get("device")
        if device is None or torch.device(device) == OTHER:
            return func(*args, **given)
        return torch.ones(args[0].shape, dtype=given.get("dtype") or args[0].dtype)

    def _require_one_side(self, func: Any, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        if func in _INDEXED and args[0].device == OTHER:
            tensors = [args[0], *tensors[-1:]] if func is torch.ops.aten.index_put_.default else [args[0]]
        # A single number may stay on the CPU.
        sides = {tensor.device.type for tensor in tensors if tensor.ndim}
        if len(sides) > 1:
            raise RuntimeError(f"{func} was given arrays of {' and '.join(sorted(sides))}.")


def _of_ones(func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> Any:
    """What an operator gives where all that lies there is ones."""

    def here(leaf: Any) -> Any:
        lies_there = isinstance(leaf, torch.Tensor) and leaf.device == OTHER
        return torch.ones(leaf.shape, dtype=leaf.dtype) if lies_there else leaf

    found = func(*tree_map(here, args), **tree_map(here, given))
    return tree_map(lambda leaf: leaf.to(OTHER) if isinstance(leaf, torch.Tensor) else leaf, found)
