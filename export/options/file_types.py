"""The types of files that llama.cpp's quantizer makes, each a mixture around one type of tensors."""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.bundle.gguf.types import ggml_type
from edgeinfer.errors import UsageError


@dataclass(frozen=True)
class FileType:
    """A type of files.

    Attributes:
        name: as llama.cpp's own tool writes it.
        number: llama.cpp's number of it.
        base: type of most tensors.
        needs_importance: llama.cpp makes it with importance data only.
    """

    name: str
    number: int
    base: str
    needs_importance: bool = False

    @property
    def is_float(self) -> bool:
        """Whether tensors stay plain numbers."""
        return self.base in _FLOATS


_FLOATS = ("F32", "F16", "BF16")
_NEEDY = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS", "Q2_K_S")
# Numbers and types of tensors from llama.h and llama-quant.cpp. Withdrawn ones are missing, and those that no published
# reader knows.
_ROWS = (
    ("F32", 0, "F32"), ("F16", 1, "F16"), ("BF16", 32, "BF16"), ("Q8_0", 7, "Q8_0"), ("Q6_K", 18, "Q6_K"),
    ("Q5_K_M", 17, "Q5_K"), ("Q5_K_S", 16, "Q5_K"), ("Q5_1", 9, "Q5_1"), ("Q5_0", 8, "Q5_0"),
    ("Q4_K_M", 15, "Q4_K"), ("Q4_K_S", 14, "Q4_K"), ("Q4_1", 3, "Q4_1"), ("Q4_0", 2, "Q4_0"),
    ("IQ4_NL", 25, "IQ4_NL"), ("IQ4_XS", 30, "IQ4_XS"), ("MXFP4_MOE", 38, "MXFP4"),
    ("Q3_K_L", 13, "Q3_K"), ("Q3_K_M", 12, "Q3_K"), ("Q3_K_S", 11, "Q3_K"),
    ("IQ3_M", 27, "IQ3_S"), ("IQ3_S", 26, "IQ3_S"), ("IQ3_XS", 22, "IQ3_S"), ("IQ3_XXS", 23, "IQ3_XXS"),
    ("Q2_K", 10, "Q2_K"), ("Q2_K_S", 21, "Q2_K"), ("IQ2_M", 29, "IQ2_S"), ("IQ2_S", 28, "IQ2_XS"),
    ("IQ2_XS", 20, "IQ2_XS"), ("IQ2_XXS", 19, "IQ2_XXS"), ("TQ2_0", 37, "TQ2_0"), ("TQ1_0", 36, "TQ1_0"),
    ("IQ1_M", 31, "IQ1_M"), ("IQ1_S", 24, "IQ1_S"),
)  # fmt: skip
# By name, from large to small.
FILE_TYPES = {name: FileType(name, number, base, name in _NEEDY) for name, number, base in _ROWS}
# Of the quantizer: tensors as they are, those of some layers left out.
COPY = FileType("COPY", 0, "F32")
# The type whose experts are those of a checkpoint in MXFP4.
PACKED_KIND = "MXFP4_MOE"
# As llama.cpp's own tool takes them.
_ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}

# What a single tensor may be made, with the types among them that need importance data whatever the file.
TENSOR_TYPES = tuple(dict.fromkeys(row[2] for row in _ROWS))
# Where rows are no whole blocks, from llama-quant.cpp.
_FALLBACKS = {
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    **dict.fromkeys(("Q2_K", "Q3_K", "TQ1_0", "TQ2_0"), "Q4_0"),
    **{"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"},
}
_NEEDY_TENSORS = frozenset({"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"})


def find_file_type(name: str) -> FileType:
    """A type of files by its name, in any case."""
    upper = name.upper()
    found = FILE_TYPES.get(_ALIASES.get(upper, upper))
    if found is None:
        raise UsageError(f"There is no GGUF type {name!r}.", f"Choose one of {', '.join(FILE_TYPES)}.")
    return found


def find_tensor_type(name: str) -> str:
    """A type of tensors by its name, in any case."""
    upper = name.upper()
    if upper not in TENSOR_TYPES:
        raise UsageError(f"A tensor cannot have the type {name!r}.", f"Choose one of {', '.join(TENSOR_TYPES)}.")
    return upper


def fitting(tensor_type: str, columns: int) -> str:
    """The type that llama.cpp gives a tensor of so many columns instead of the requested one: blocks must fit a row."""
    if columns % ggml_type(tensor_type).block_values == 0:
        return tensor_type
    smaller = _FALLBACKS.get(tensor_type, "F16")
    return smaller if columns % ggml_type(smaller).block_values == 0 else "F16"


def needs_importance(tensor_type: str) -> bool:
    """Whether llama.cpp needs importance data for tensors of this type."""
    return tensor_type in _NEEDY_TENSORS
