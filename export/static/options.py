"""What a caller may ask of a static export, validated on construction; knows nothing of how it is done."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from edgeinfer.bundle import DecoderSpec
from edgeinfer.bundle.static_graph import StaticGraphs
from edgeinfer.errors import BundleError, UsageError

__all__ = ["StaticOptions"]

_DEFAULT_CONTEXT, _DEFAULT_CHUNK = 1024, 64
_LARGEST_WIDTH = 256


@dataclass(frozen=True)
class StaticOptions:
    """The shapes that are fixed at export.

    Attributes:
        context: tokens of prompt plus reply; None is 1024, or what the model allows.
        chunk: prompt tokens per pass; None is 64, or what context and widths allow.
        widths: rows of the passes that decode and verify drafts, ascending.
        layers: that are kept, ascending; empty for all.
    """

    context: int | None = None
    chunk: int | None = None
    widths: tuple[int, ...] = (1, 2, 4, 8)
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.widths or any(a >= b for a, b in itertools.pairwise(self.widths)):
            raise UsageError(f"Static widths {_listed(self.widths)} do not ascend.", "Write them like 1,2,4,8.")
        if not 1 <= self.widths[0] <= self.widths[-1] <= _LARGEST_WIDTH:
            hint = f"Choose 1 to {_LARGEST_WIDTH} rows, as 1,2,4,8."
            raise UsageError(f"Static widths {_listed(self.widths)} are not possible.", hint)
        if self.chunk is not None and self.chunk < self.widths[-1]:
            message = f"A static chunk of {self.chunk} is below the largest width, {self.widths[-1]}."
            raise UsageError(message, f"Choose at least {self.widths[-1]}, or narrower widths.")
        if self.context is not None and self.context < (self.chunk or self.widths[-1]):
            message = f"A static context of {self.context} tokens is below the chunk and the largest width."
            raise UsageError(message, "Choose a larger context, or a smaller chunk.")
        if any(a >= b for a, b in itertools.pairwise(self.layers)) or min(self.layers, default=0) < 0:
            raise UsageError(f"Static layers {_listed(self.layers)} do not ascend.", "Write them like 0-5,8.")

    def graphs(self, spec: DecoderSpec) -> StaticGraphs:
        """The graphs of a decoder.

        Raises:
            UsageError: it has no such layers, or no such context.
        """
        if self.layers and self.layers[-1] >= spec.num_layers:
            message = f"The model has no layer {self.layers[-1]}."
            raise UsageError(message, f"Its layers are numbered 0 to {spec.num_layers - 1}.")
        if self.context is not None and self.context > spec.max_positions:
            message = f"A static context of {self.context} tokens was asked for, the model allows {spec.max_positions}."
            raise UsageError(message, f"Use --static-context {spec.max_positions} or less.")
        context = self.context or min(_DEFAULT_CONTEXT, spec.max_positions)
        chunk = self.chunk or max(self.widths[-1], min(_DEFAULT_CHUNK, context))
        try:
            return StaticGraphs(context, chunk, self.widths, self.layers or tuple(range(spec.num_layers)))
        except BundleError as error:
            hint = f"The model allows a context of {spec.max_positions} tokens, which chunk and widths must not exceed."
            raise UsageError(error.message, hint) from error


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers)) or "(none)"
