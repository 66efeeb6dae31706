"""The tensors of hidden states in several streams, of which checkpoint tensors they are made, and their shapes."""

from __future__ import annotations

from collections.abc import Iterator

from edgeinfer.bundle import DecoderSpec
from edgeinfer.export.architectures.plans import TensorPlan, plan

__all__ = ["layer_streams", "model_streams"]

_OTHERS = {"enter": "altup_projections", "leave": "altup_unembed_projections"}


def model_streams(spec: DecoderSpec, root: str) -> Iterator[TensorPlan]:
    """The matrices by which embeddings enter the streams and hidden states leave them, where there are streams.

    Args:
        root: of the checkpoint's names: the model's module and a dot.
    """
    if spec.streams is None:
        return
    shape = (spec.hidden_size, spec.hidden_size)
    for name, module in _OTHERS.items():
        sources = ((f"{root}{module}.{place}.weight", shape) for place in range(spec.streams.count - 1))
        yield plan(f"streams.{name}", *sources)


def layer_streams(spec: DecoderSpec, layer: int, root: str) -> Iterator[TensorPlan]:
    """What predicts and corrects the streams in a layer, and what augments its residual.

    Args:
        root: of the checkpoint's names: the layer's module and a dot.
    """
    if spec.streams is None:
        return
    hidden, count, rank = spec.hidden_size, spec.streams.count, spec.streams.laurel_rank
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        "streams.router_norm": ("altup.router_norm", (hidden,)),
        "streams.router": ("altup.modality_router", (count, hidden)),
        "streams.predict": ("altup.prediction_coefs", (count * count, count)),
        "streams.correct": ("altup.correction_coefs", (count, count)),
        "laurel.down": ("laurel.linear_left", (rank, hidden)),
        "laurel.up": ("laurel.linear_right", (hidden, rank)),
        "laurel.norm": ("laurel.post_laurel_norm", (hidden,)),
    }
    for name, (module, shape) in tensors.items():
        yield plan(f"layers.{layer}.{name}", (f"{root}{module}.weight", shape))
    if spec.streams.scaled:
        yield plan(f"layers.{layer}.streams.scale", (f"{root}altup.correct_output_scale", (hidden,)))
