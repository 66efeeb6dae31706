"""What is said of a checkpoint whose family has no builder: its name, what others lack, and what runs instead."""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.errors import UnsupportedArchitectureError
from edgeinfer.export.source.hf_config import OPTIMUM_HINT, HFConfig

__all__ = ["ASSISTANTS", "refusal"]

_OTHERS = "Choose another model, such as those of: edgeinfer models --catalog"


@dataclass(frozen=True)
class _Refused:
    """A family without a builder.

    Attributes:
        title: as its makers call it.
        why: what it has that no builder makes; "" for details that take too long to name.
        hint: what to do instead.
    """

    title: str
    why: str = ""
    hint: str = _OTHERS


_ASSISTANT = _Refused(
    "Gemma 4's assistant model",
    "its layers have no cache and read the one of the model that it drafts for",
    "Export that model without it: lookups of earlier text draft for it.",
)
# By transformers' `model_type`: drafters that no export can take with a model.
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
# Likewise. Recurrent layers are refused in GGUF files too: their state cannot be cut back.
_FAMILIES = {"mamba": _Refused("Mamba", "recurrent layers"), **dict.fromkeys(ASSISTANTS, _ASSISTANT)}


def refusal(config: HFConfig) -> UnsupportedArchitectureError:
    """The error of a checkpoint that no builder is for."""
    family = _FAMILIES.get(config.model_type)
    if family is None:
        named = config.architecture or config.model_type
        message = f"Models of the class {named} are not supported." if named else "config.json names no model class."
        return UnsupportedArchitectureError(message, f"Run a GGUF of it where there is one. {OPTIMUM_HINT}")
    why = f" ({family.why})" if family.why else ""
    return UnsupportedArchitectureError(f"{family.title} is not supported yet{why}.", family.hint)
