"""What is said of a checkpoint whose family has no builder: its name, what others lack, and what runs instead."""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.errors import UnsupportedArchitectureError
from edgeinfer.export.source.hf_config import OPTIMUM_HINT, HFConfig

__all__ = ["refusal"]

_RUN_GGUF = "Run a GGUF of it: -m OWNER/NAME:Q4_K_M"
_OTHERS = "Choose another model, such as those of: edgeinfer models --catalog"


@dataclass(frozen=True)
class _Refused:
    """A family without a builder.

    Attributes:
        title: as its makers call it.
        why: what it has that no builder makes; "" for details that take too long to name.
        gguf: whether llama.cpp runs it here.
    """

    title: str
    why: str = ""
    gguf: bool = True


# By transformers' `model_type`. Recurrent layers are refused in GGUF files too: their state cannot be cut back.
_FAMILIES = {
    "mamba": _Refused("Mamba", "recurrent layers", gguf=False),
}


def refusal(config: HFConfig) -> UnsupportedArchitectureError:
    """The error of a checkpoint that no builder is for."""
    family = _FAMILIES.get(config.model_type)
    if family is None:
        named = config.architecture or config.model_type
        message = f"Models of the class {named} are not supported." if named else "config.json names no model class."
        return UnsupportedArchitectureError(message, f"Run a GGUF of it where there is one. {OPTIMUM_HINT}")
    why = f" ({family.why})" if family.why else ""
    return UnsupportedArchitectureError(
        f"{family.title} is not supported yet{why}.", _RUN_GGUF if family.gguf else _OTHERS
    )
