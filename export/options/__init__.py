"""The options of an export, validated on construction, and the types of GGUF files that can be asked for."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.bundle.gguf.metadata import ggml_type
from edgeinfer.bundle.layouts import LAYOUTS, NATIVE, Layout
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.static_graph import StaticGraphs
from edgeinfer.core.errors import BundleError, Setting, UsageError
from edgeinfer.core.options.load import CONVERTED_BITS, FLOAT_BITS
from edgeinfer.export.source.calibration_text import DEFAULT_TEXT
from edgeinfer.quant.budget import Limits
from edgeinfer.quant.calibration import default_tokens
from edgeinfer.quant.methods import METHODS
from edgeinfer.quant.policy import QuantPolicy, default_group_size, default_head_bits

_DEFAULT_CONTEXT, _DEFAULT_CHUNK = 1024, 64
_LARGEST_WIDTH = 256
FORMATS = ("onnx", "gguf")
EXPORTERS = ("native", "optimum")
# llama.cpp's types by bits; of those with four, the one its kernels are fastest at.
_GGUF_TYPES = {2: "Q2_K", 3: "Q3_K_M", 4: "Q4_0", 5: "Q5_K_M", 6: "Q6_K", 8: "Q8_0", 16: "F16", 32: "F32"}
_GROUP_SIZES = (32, 64, 128)
# In place of a file to calibrate with.
NO_TEXT = "none"
# Bits that all linear layers have, with a text or without.
_SAME = (8, FLOAT_BITS)
# Models of up to so many weights have 8 bits where no text tells what fewer cost: SmolLM2-135M and Gemma-3-270M lose
# 0.007 and 0.015 nats by them, and the first 0.1 by 5.
_SMALL_MODEL = 5 << 26
# Bits of linear layers where nothing else decides.
_USUAL_BITS = 4
# Fewer say little of a model; more cost hours and change nothing.
_FEWEST_TOKENS, _MOST_TOKENS = 64, 1 << 22
_UNRECORDED = (
    *("name", "layout", "force", "calibration", "calibration_tokens", "max_size"),
    *("format", "gguf_type", "types_for", "prune_layers", "prune_count", "static", "drafter"),
)


@dataclass(frozen=True)
class StaticOptions:
    """Shapes that are fixed at export."""

    context: int | None = None  # tokens of prompt plus reply; None is 1024, or as many as the model allows
    chunk: int | None = None  # prompt tokens per pass; None is 64, or as many as context and widths allow
    widths: tuple[int, ...] = (1, 2, 4, 8)  # rows of the passes that decode and verify drafts, ascending
    layers: tuple[int, ...] = ()  # to keep, ascending; empty for all

    def __post_init__(self) -> None:
        if not self.widths or any(a >= b for a, b in itertools.pairwise(self.widths)):
            raise UsageError(f"Static widths {_listed(self.widths)} do not ascend.", "Write them like 1,2,4,8.")
        if not 1 <= self.widths[0] <= self.widths[-1] <= _LARGEST_WIDTH:
            hint = f"Choose 1 to {_LARGEST_WIDTH} rows, such as 1,2,4,8."
            raise UsageError(f"Static widths {_listed(self.widths)} are out of range.", hint)
        if self.chunk is not None and self.chunk < self.widths[-1]:
            message = f"A static chunk of {self.chunk} is below the largest width, {self.widths[-1]}."
            raise UsageError(message, f"Choose at least {self.widths[-1]}, or narrower widths.")
        if self.context is not None and self.context < (self.chunk or self.widths[-1]):
            message = f"A static context of {self.context} tokens is below the chunk and the largest width."
            raise UsageError(message, "Choose a larger context, or a smaller chunk.")
        if any(a >= b for a, b in itertools.pairwise(self.layers)) or min(self.layers, default=0) < 0:
            raise UsageError(f"Static layers {_listed(self.layers)} do not ascend.", "Write them like 0-5,8.")

    def graphs(self, spec: DecoderSpec) -> StaticGraphs:
        if self.layers and self.layers[-1] >= spec.num_layers:
            message = f"The model has no layer {self.layers[-1]}."
            raise UsageError(message, f"Its layers are numbered 0 to {spec.num_layers - 1}.")
        if self.context is not None and self.context > spec.max_positions:
            allowed = spec.max_positions
            message = f"A static context of {self.context} tokens was requested, but the model allows only {allowed}."
            raise UsageError(message, f"Use --static-context {allowed} or less.")
        context = self.context or min(_DEFAULT_CONTEXT, spec.max_positions)
        chunk = self.chunk or max(self.widths[-1], min(_DEFAULT_CHUNK, context))
        try:
            return StaticGraphs(context, chunk, self.widths, self.layers or tuple(range(spec.num_layers)))
        except BundleError as error:
            hint = f"The model allows a context of {spec.max_positions} tokens, which chunk and widths must not exceed."
            raise UsageError(error.message, hint) from error


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers)) or "(none)"


@dataclass(frozen=True)
class ExportConfig:
    """How a checkpoint becomes a bundle."""

    # Of a weight. None is the least whose predicted divergence stays below `max_divergence`. 8 is of the linear layers,
    # 32 keeps float32, and a GGUF file may have 16; other numbers are averages of weights.bin that are spent where the
    # model gains most. Without a calibration text all are of the linear layers, and None follows rules.
    bits: float | None = None
    # Values that share a scale; None decides by the model's size. A layer whose width it does not divide takes the next
    # smaller one that does.
    group_size: int | None = None
    symmetric: bool = False  # no stored zero points: a tenth smaller, a little less exact
    minima: bool = False  # 4 bits have a minimum for each group of 32 where rows are multiples of 256; native only
    head_bits: int | None = None  # of embedding and LM head; None decides by their size
    # Linear layers of at most 65536 weights get more bits: 8 instead of 2 to 6, float32 instead of 8.
    keep_small: bool = True
    # Of edgeinfer.quant.methods; None is "gptq" where there is a calibration text, else "rtn".
    method: str | None = None
    # UTF-8 text to run the model on; "default" is the one that ships, read where it decides, "none" none.
    calibration: Path | str = DEFAULT_TEXT
    calibration_tokens: int | None = None  # of the text; None decides by the model's size
    max_divergence: float = 0.03  # from the float model in nats a token, where bits are None
    max_size: int | None = None  # of weights.bin in bytes, where bits are None; goes before `max_divergence`
    target_size: int | None = None  # of weights.bin in bytes, spent where the model gains most, instead of bits
    # `bits_for`, `types_for`: bits or GGUF types of tensors by glob patterns, of which the last match wins, in any
    # case.
    bits_for: tuple[tuple[str, int], ...] = ()
    # "native" for our own kernel, "portable" for MatMulNBits; either can be converted to the other.
    layout: Layout = NATIVE
    exporter: str = "native"  # "native" builds the graph itself, "optimum" uses optimum-onnx
    format: str = "onnx"  # "onnx", or "gguf" for llama.cpp
    gguf_type: str | None = None  # llama.cpp's name of a GGUF file's type, as Q4_K_M; None decides by `bits`
    types_for: tuple[tuple[str, str], ...] = ()
    # `prune_layers`, `prune_count`: layers to leave out of a GGUF file, or how many, for a drafter.
    prune_layers: tuple[int, ...] = ()
    prune_count: int = 0
    static: StaticOptions | None = None  # fixed shapes, for devices that run no others; None makes an ordinary bundle
    drafter: Path | None = None  # a checkpoint of a draft module for the bundle
    name: str | None = None  # in the manifest; None takes the folder's
    force: bool = False  # replace an existing bundle

    def __post_init__(self) -> None:
        _choice("format", self.format, FORMATS)
        self._check_bits()
        _choice("group_size", self.group_size, (None, *_GROUP_SIZES))
        _choice("head_bits", self.head_bits, (None, *CONVERTED_BITS))
        _choice("layout", self.layout, LAYOUTS)
        _choice("exporter", self.exporter, EXPORTERS)
        if self.name is not None and not self.name.strip():
            raise UsageError("The name is empty.", "Leave it out to use the folder's name.")
        self._check_method()
        self._check_budget()
        for pattern, bits in self.bits_for:
            _choice("bits_for", bits, CONVERTED_BITS)
            if not pattern:
                raise UsageError("A pattern of bits_for is empty.", "Write it like layers.*.mlp.down=8.")
        if self.drafter is not None:
            # The native graph alone gives a drafter the states that it reads.
            asked = {
                f"format={self.format!r}": self.format != "onnx",
                f"exporter={self.exporter!r}": self.exporter != "native",
                f"layout={self.layout!r}": self.layout != NATIVE,
                "static": self.static is not None,
            }
            _refuse(asked, "with a drafter", "Leave it out, or leave --drafter out.")
        if self.exporter != "native":
            # The optimum exporter names no tensors and runs no layers.
            asked = {
                "method": self.method not in (None, "rtn"),
                "calibration": isinstance(self.calibration, Path),
                "target_size": self.target_size is not None,
                "bits_for": bool(self.bits_for),
            }
            _refuse(asked, f"by the {self.exporter} exporter", "Leave it out, or use the native exporter.")
        if self.exporter != "native" or self.layout != NATIVE:
            asked = {**self._asked_bits(5, 6), "minima": self.minima}
            where = f"by the {self.exporter} exporter" if self.exporter != "native" else "in the portable layout"
            _refuse(asked, where, "Choose --bits 4 or 8, or the native layout, which alone has them.")
        if self.minima and self.symmetric:
            raise UsageError("minima and symmetric are both given.", "Leave one of them out.")
        if self.static is not None:
            self._check_static()
        if self.format == "gguf":
            self._check_gguf()
        else:
            asked = {
                "A GGUF type": self.gguf_type is not None or bool(self.types_for),
                "Leaving layers out": bool(self.prune_layers or self.prune_count),
            }
            _refuse(asked, "for ONNX models", "Add --format gguf, or leave it out.")

    def _check_method(self) -> None:
        _choice("method", self.method, (None, *METHODS))
        if isinstance(self.calibration, str):
            _choice("calibration", self.calibration, (DEFAULT_TEXT, NO_TEXT))
        if self._needs_text and self.calibration == NO_TEXT:
            hint = "Leave --no-calibration out, or choose a method that needs no text, such as rtn."
            raise UsageError(f"The method {self.method} needs a calibration text.", hint)
        tokens = self.calibration_tokens
        if tokens is not None and not _FEWEST_TOKENS <= tokens <= _MOST_TOKENS:
            hint = f"Choose {_FEWEST_TOKENS} to {_MOST_TOKENS}."
            raise UsageError(Setting("calibration_tokens", tokens) + " is out of range.", hint)

    def _check_bits(self) -> None:
        whole = (None, *(CONVERTED_BITS if self.format == "onnx" else _GGUF_TYPES))
        averages = not self.is_uniform and self.calibration != NO_TEXT
        asked = self.bits if averages and self.bits not in (None, 8, 16) else None
        if not (asked and 1 < asked < FLOAT_BITS and (self.format == "onnx" or asked % 1)):
            _choice("bits", self.bits, whole)
        if not 0 < self.max_divergence < math.inf:
            message = Setting("max_divergence", self.max_divergence) + " is out of range."
            raise UsageError(message, "Use a positive number of nats, such as 0.03.")

    def _check_budget(self) -> None:
        if self.bits is not None and self.target_size is not None:
            both = Setting("bits") + " and " + Setting("target_size")
            raise UsageError(both + " are both given.", "Leave one of them out.")
        for name, size in (("target_size", self.target_size), ("max_size", self.max_size)):
            if size is not None and size <= 0:
                raise UsageError(Setting(name, size) + " is out of range.", "Use a positive number of bytes.")

    def _check_gguf(self) -> None:
        """Refuses options that llama.cpp's types decide."""
        asked = {
            "exporter": self.exporter != "native",
            "layout": self.layout != NATIVE,
            "method": self.method is not None,
            "group_size": self.group_size is not None,
            "symmetric": self.symmetric,
            "head_bits": self.head_bits is not None,
            "minima": self.minima,
            "keep_small": not self.keep_small,
            "bits_for": bool(self.bits_for),
        }
        _refuse(asked, "for GGUF models", "Leave it out, and choose a type, such as --type Q4_K_M.")
        if find_file_type(self.gguf_kind).needs_importance and self.calibration == NO_TEXT and not self.has_budget:
            message = f"{self.gguf_kind} needs a calibration text."
            raise UsageError(message, "Leave --no-calibration out, or choose a larger type.")
        if self.calibration == NO_TEXT and (self.has_budget or self.prune_count):
            raise UsageError("Types by size, and layers to leave out, need a text.", "Leave --no-calibration out.")
        if self.has_budget and self.gguf_type is not None:
            raise UsageError("A type and a size are both given.", "Leave one of them out.")
        if self.prune_layers and self.prune_count:
            raise UsageError("prune_layers and prune_count are both given.", "Leave one of them out.")
        if self.prune_count < 0 or min(self.prune_layers, default=0) < 0:
            raise UsageError("A negative layer cannot be left out.", "Layers are numbered from 0.")
        for pattern, kind in self.types_for:
            find_tensor_type(kind)
            if not pattern:
                raise UsageError("A pattern of types_for is empty.", "Write it like blk.*.ffn_down.weight=Q8_0.")

    def _check_static(self) -> None:
        """Refuses options without an operator in ONNX's standard, or without meaning at fixed shapes."""
        asked = {
            f"format={self.format!r}": self.format != "onnx",
            f"exporter={self.exporter!r}": self.exporter != "native",
            f"layout={self.layout!r}": self.layout != NATIVE,
            "target_size": self.target_size is not None,
            **self._asked_bits(2, 3, 5, 6),
            "minima": self.minima,
        }
        _refuse(asked, "for static models", "Leave it out, and choose --bits 4, 8 or 32, or leave --static out.")

    def _asked_bits(self, *widths: int) -> dict[str, bool]:
        """Which of some widths are asked for, by what messages call them."""
        given = (None if self.has_budget else self.bits, self.head_bits, *(bits for _, bits in self.bits_for))
        return {f"{bits} bits": bits in given for bits in widths}

    @property
    def is_reworked(self) -> bool:
        """Whether a GGUF file is more than the checkpoint's tensors in one type."""
        return self.has_budget or bool(self.types_for or self.prune_layers or self.prune_count)

    @property
    def gguf_kind(self) -> str:
        if self.gguf_type is not None:
            return find_file_type(self.gguf_type).name
        return _GGUF_TYPES[_USUAL_BITS if self.bits is None or self.bits % 1 else int(self.bits)]

    @property
    def is_uniform(self) -> bool:
        """Whether the route knows no bits but the same for all matrices."""
        return self.static is not None or self.exporter != "native"

    @property
    def is_calibrated(self) -> bool:
        """Whether a text is read."""
        if self.calibration != DEFAULT_TEXT:
            return self.calibration != NO_TEXT
        if self.format == "gguf":
            return self.has_budget or self.prune_count > 0 or find_file_type(self.gguf_kind).needs_importance
        return self.has_budget or self._needs_text

    @property
    def _needs_text(self) -> bool:
        return self.method is not None and METHODS[self.method].needs != "nothing"

    @property
    def has_budget(self) -> bool:
        """Whether bits of every tensor are chosen by what they are predicted to cost."""
        if self.target_size is not None:
            return True
        if self.format == "gguf":
            return self.bits is not None and self.bits % 1 > 0
        return not self.is_uniform and (self.bits is None or (self.calibration != NO_TEXT and self.bits not in _SAME))

    def budget_bytes(self, parameters: int) -> int | None:
        """Size limit of weights.bin for this number of parameters; None where there is none."""
        if self.has_budget and self.bits is not None:
            return math.floor(self.bits * parameters / 8)
        return self.target_size

    def with_defaults(self, weights: int, vocabulary_weights: int) -> ExportConfig:
        """Fills in the options that depend on the model's size, and not on a budget."""
        chosen = self.has_budget or (self.bits is None and self.is_uniform)
        ruled = chosen and not self.is_calibrated and self.target_size is None
        if ruled and weights <= _SMALL_MODEL:
            return dataclasses.replace(self, bits=8).with_defaults(weights, vocabulary_weights)
        method = self.method or ("gptq" if self.is_calibrated else "rtn")
        tokens = self.calibration_tokens or default_tokens(weights)
        if self.has_budget:
            return dataclasses.replace(self, method=method, calibration_tokens=tokens)
        bits = int(self.bits or _USUAL_BITS)
        return dataclasses.replace(
            self,
            bits=bits,
            head_bits=self.head_bits or default_head_bits(bits, vocabulary_weights),
            group_size=self.group_size or default_group_size(weights),
            method=method,
            calibration_tokens=tokens,
        )

    @property
    def policy(self) -> QuantPolicy:
        """The bits of each tensor; after `with_defaults`, without a budget."""
        assert self.bits and self.head_bits and self.group_size, "call with_defaults first"
        # The operators of ONNX Runtime, which the optimum route writes at once, read 2 bits each.
        native = self.layout == NATIVE and self.exporter == "native"
        marks = {"vectors": native, "minima": self.minima}
        return QuantPolicy(int(self.bits), self.head_bits, self.group_size, self.symmetric, self.keep_small, **marks)

    @property
    def limits(self) -> Limits:
        """Choices of a plan within a budget."""
        return Limits(self.head_bits, self.group_size, self.symmetric, self.bits_for)

    @property
    def options(self) -> dict[str, str | int | float | bool | None]:
        """The options that the manifest records: all except paths and what it says elsewhere."""
        if self.format == "gguf":
            types = " ".join(f"{pattern}={kind}" for pattern, kind in self.types_for) or None
            bits = self.bits if self.has_budget else None
            asked = {"bits": bits, "target_size": self.target_size, "types_for": types}
            return {"format": self.format, "type": self.gguf_kind} | asked
        given = {k: v for k, v in dataclasses.asdict(self).items() if k not in _UNRECORDED}
        if not self.has_budget or self.bits is not None or self.target_size is not None:
            del given["max_divergence"]
        return given | {"bits_for": " ".join(f"{pattern}={bits}" for pattern, bits in self.bits_for) or None}


def _refuse(asked: Mapping[str, bool], where: str, hint: str) -> None:
    for name, is_asked in asked.items():
        if is_asked:
            raise UsageError(f"{name} is not supported {where}.", hint)


def _choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed or isinstance(value, bool):
        choices = ", ".join(str(a) for a in allowed if a is not None)
        raise UsageError(f"{name}={value!r} is not supported.", f"Choose one of {choices}.")


@dataclass(frozen=True)
class FileType:
    name: str  # as llama.cpp's own tool writes it
    number: int  # llama.cpp's number of it
    base: str  # type of most tensors
    needs_importance: bool = False  # llama.cpp makes it with importance data only

    @property
    def is_float(self) -> bool:
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
    upper = name.upper()
    found = FILE_TYPES.get(_ALIASES.get(upper, upper))
    if found is None:
        raise UsageError(f"There is no GGUF type {name!r}.", f"Choose one of {', '.join(FILE_TYPES)}.")
    return found


def find_tensor_type(name: str) -> str:
    upper = name.upper()
    if upper not in TENSOR_TYPES:
        raise UsageError(f"A tensor cannot have the type {name!r}.", f"Choose one of {', '.join(TENSOR_TYPES)}.")
    return upper


def fitting(tensor_type: str, columns: int) -> str:
    """The type for a tensor of this width: llama.cpp replaces types whose blocks do not fit a row."""
    if columns % ggml_type(tensor_type).block_values == 0:
        return tensor_type
    smaller = _FALLBACKS.get(tensor_type, "F16")
    return smaller if columns % ggml_type(smaller).block_values == 0 else "F16"


def needs_importance(tensor_type: str) -> bool:
    return tensor_type in _NEEDY_TENSORS
