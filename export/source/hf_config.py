"""Typed reading of a checkpoint's config.json, of transformers 4 and 5 alike. Fields that the file leaves out get the
defaults of transformers, which config_defaults.json holds; `python -m tests.tools.config_defaults` writes that file."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from edgeinfer.bundle.parts import Mixer, RopeSpec
from edgeinfer.bundle.spec import Activation
from edgeinfer.core.errors import CheckpointError, UnsupportedArchitectureError
from edgeinfer.export.source.checkpoint import parse_object, read_bytes

OPTIMUM_HINT = "Try edgeinfer export with --exporter optimum (pip install 'edgeinfer[optimum]')."
_CONFIG = "config.json"
_TIED = "tie_word_embeddings"
CONFIG_HINT = "Check that config.json is complete and belongs to this model."
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
    "xielu": "xielu",
}


class HFConfig:
    def __init__(self, values: dict[str, Any]) -> None:
        listed = values.get("layers_block_type")
        if isinstance(listed, list) and values.get("num_hidden_layers") is None:
            values = values | {"num_hidden_layers": len(listed)}
        self.values = values
        classes = values.get("architectures")
        named = isinstance(classes, list) and bool(classes) and isinstance(classes[0], str)
        self.architecture: str = classes[0] if named and classes else ""  # the model class, `architectures[0]`, or ""
        self.model_type: str = str(values.get("model_type", ""))  # transformers' name of the family, or ""

    def get(self, name: str) -> Any:
        """A raw value; None where it is absent or null."""
        return self.values.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer; required unless a default is given."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**63:
            raise _wrong(name, value, "a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number; required unless a default is given."""
        return _number(self.values, name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
        return default if value is None else value

    def experts(self) -> int:
        """Number of experts of a layer, under the name of transformers 4 or 5."""
        return self.integer("num_local_experts" if self.get("num_experts") is None else "num_experts")

    def dense_layers(self) -> tuple[int, ...]:
        """Layers of a Qwen that have an ordinary MLP: `mlp_only_layers`, and all but each `decoder_sparse_step`th."""
        given = self.values.get("mlp_only_layers") or []
        if not isinstance(given, list) or not all(isinstance(layer, int) for layer in given):
            raise _wrong("mlp_only_layers", given, "a list of layers")
        step = self.integer("decoder_sparse_step", 1)
        layers = range(self.integer("num_hidden_layers"))
        return tuple(layer for layer in layers if layer in given or (layer + 1) % step)

    def activation(self, field: str = "hidden_act") -> Activation:
        """The MLP's activation function, which a family may name in another field."""
        name = self.values.get(field, "silu")
        if not isinstance(name, str) or name not in _ACTIVATIONS:
            raise UnsupportedArchitectureError(f"The activation {name!r} is not supported.", OPTIMUM_HINT)
        return _ACTIVATIONS[name]

    def head_dim(self) -> int:
        hidden, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        given = self.values.get("head_dim")
        if given is None and hidden % heads:
            raise _wrong("hidden_size", hidden, f"a multiple of num_attention_heads={heads}")
        return self.integer("head_dim", hidden // heads)

    def rope(self, head_dim: int, layers: str = "", *, partial: float = 1.0) -> RopeSpec:
        """Rotary embedding from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4), of all
        layers or of a type with its own, such as "full_attention"; `partial` is the default share of rotated
        channels."""
        given = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        if isinstance(given, dict) and layers and isinstance(given.get(layers), dict):
            given = given[layers]
        if not isinstance(given, dict) or any(isinstance(each, dict) for each in given.values()):
            raise _wrong("rope_parameters", given, "an object with the constants of one rotation")
        kind = given.get("rope_type", given.get("type", "default"))
        theta = _number(given, "rope_theta", self.number("rope_theta", 10000.0))
        partial = _number(given, "partial_rotary_factor", self.number("partial_rotary_factor", partial))
        dim = int(head_dim * partial)
        if kind in ("su", "longrope"):
            return self._longrope(given, theta, dim)
        if kind == "dynamic" and given.get("alpha") is not None and dim > 2:
            # Hunyuan calls this dynamic, but the stretched base is the same for every length.
            return RopeSpec("default", theta * _number(given, "alpha") ** (dim / (dim - 2)), dim)
        # Text has one position where a picture has three.
        if kind in ("default", "mrope"):
            return RopeSpec("default", theta, dim)
        if kind == "proportional":
            turned = int(partial * head_dim // 2)
            return RopeSpec("proportional", theta, head_dim, factor=_number(given, "factor", 1.0), turned=turned)
        if kind == "yarn":
            return self._yarn(given, theta, dim)
        if kind == "linear":
            return RopeSpec("linear", theta, dim, factor=_number(given, "factor"))
        if kind == "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor")
            factors: dict[str, Any] = {name: _number(given, name) for name in names}
            original = int(_number(given, "original_max_position_embeddings"))
            return RopeSpec("llama3", theta, dim, original_max_positions=original, **factors)
        raise UnsupportedArchitectureError(f"Rotary embedding of type {kind!r} is not supported.", OPTIMUM_HINT)

    def rope_number(self, name: str) -> float:
        given = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        return _number(given if isinstance(given, dict) else {}, name)

    def _yarn(self, given: dict[str, Any], theta: float, dim: int) -> RopeSpec:
        longest = self.integer("max_position_embeddings")
        original = int(_number(given, "original_max_position_embeddings", longest))
        factor = _number(given, "factor", longest / original)
        # Source: the YaRN paper and transformers' _compute_yarn_parameters.
        mscales = [given.get(name) for name in ("mscale", "mscale_all_dim")]
        if all(mscales):
            above, below = (yarn_scale(factor, _number(given, name)) for name in ("mscale", "mscale_all_dim"))
            derived = above / below
        else:
            derived = yarn_scale(factor, 1.0)
        truncate = given.get("truncate")
        if truncate is not None and not isinstance(truncate, bool):
            raise _wrong("truncate", truncate, "true or false")
        return RopeSpec(
            "yarn",
            theta,
            dim,
            factor=factor,
            original_max_positions=original,
            attention_factor=_number(given, "attention_factor", derived),
            beta_fast=_number(given, "beta_fast", 32.0),
            beta_slow=_number(given, "beta_slow", 1.0),
            truncate=truncate is not False,
            query_beta=0.0 if not given.get("llama_4_scaling_beta") else _number(given, "llama_4_scaling_beta"),
        )

    def _longrope(self, given: dict[str, Any], theta: float, dim: int) -> RopeSpec:
        longest = self.integer("max_position_embeddings")
        original = self.integer("original_max_position_embeddings", longest)
        original = int(_number(given, "original_max_position_embeddings", original))
        factor = _number(given, "factor", longest / original)
        # Source: the LongRoPE paper and transformers' _compute_longrope_parameters.
        derived = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        return RopeSpec(
            "longrope",
            theta,
            dim,
            factor=factor,
            original_max_positions=original,
            short_factors=_numbers(given, "short_factor"),
            long_factors=_numbers(given, "long_factor"),
            attention_factor=_number(given, "attention_factor", derived),
        )

    def local_rope(self, head_dim: int) -> RopeSpec:
        """The rotation of layers with a window: their own (`rope_local_base_freq` where given), else a plain one."""
        given = self.values.get("rope_parameters")
        if isinstance(given, dict) and isinstance(given.get("sliding_attention"), dict):
            return self.rope(head_dim, "sliding_attention")
        nested = given.get("rope_theta") if isinstance(given, dict) else None
        theta = self.number("rope_theta", 10000.0) if nested is None else _number({"rope_theta": nested}, "rope_theta")
        return RopeSpec("default", self.number("rope_local_base_freq", theta), head_dim)

    def slides(self, pattern: int = 0) -> list[bool]:
        """Which layers have a sliding window, by `layer_types`, or all but each `pattern`th; 0 is none."""
        layers, kinds = self.integer("num_hidden_layers"), self.values.get("layer_types")
        if kinds is None:
            given = self.values.get("sliding_window_pattern")
            step = pattern if given is None else self.integer("sliding_window_pattern")
            return [bool(step) and (layer + 1) % step != 0 for layer in range(layers)]
        known = isinstance(kinds, list) and set(kinds) <= {"full_attention", "sliding_attention"}
        if not known or len(kinds) != layers:
            raise _wrong("layer_types", kinds, f"full_attention or sliding_attention for each of {layers} layers")
        return [kind == "sliding_attention" for kind in kinds]

    def windows_of(self, slides: list[bool]) -> tuple[int, ...]:
        """Windows of the layers that slide, and 0 of the others; empty where none does."""
        given = self.values.get("sliding_window")
        if given is None or not any(slides):
            return ()
        window = self.integer("sliding_window")
        # A window as long as the context is full attention.
        if window >= self.integer("max_position_embeddings"):
            return ()
        return tuple(window if s else 0 for s in slides)

    def uniform_windows(self) -> tuple[int, ...]:
        return self.windows_of([True] * self.integer("num_hidden_layers"))

    def mixers(self, types: object, mixers: Mapping[str, Mixer]) -> tuple[Mixer, ...]:
        """The mixer of each layer by its type; empty where all layers attend."""
        layers = self.integer("num_hidden_layers")
        known = isinstance(types, list) and all(isinstance(each, str) and each in mixers for each in types)
        if not known or not isinstance(types, list) or len(types) != layers:
            raise CheckpointError(
                f"config.json: layer_types={types!r} is not {layers} of {', '.join(mixers)}.", CONFIG_HINT
            )
        found = tuple(mixers[each] for each in types)
        return () if set(found) == {"attention"} else found

    def windows_by_layer(self) -> tuple[int, ...]:
        """Qwen's windows: by `layer_types`, or from layer `max_window_layers` on, if `use_sliding_window` is set."""
        layers = self.integer("num_hidden_layers")
        if not self.flag("use_sliding_window"):
            return ()
        if self.values.get("layer_types") is None:
            first = self.values.get("max_window_layers", 0)
            return self.windows_of([layer >= first for layer in range(layers)])
        return self.windows_of(self.slides())


def read_config(folder: Path) -> HFConfig:
    """Reads config.json, with defaults of transformers' configuration classes."""
    path = folder / _CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {_CONFIG}.", "Point to a Hugging Face checkpoint directory.")
    values = parse_object(read_bytes(path), str(path))
    text, kind = values.get("text_config"), values.get("model_type")
    if isinstance(text, dict):
        kind = text.get("model_type", kind)
        # Of a multimodal model only the language model is read, under the whole model's name.
        whole: dict[str, Any] = {name: values[name] for name in ("architectures", "model_type") if name in values}
        if len({each.get(_TIED) for each in (values, text)}) > 1:
            whole[_TIED] = None  # The tensors say which of them holds.
        values = values | text | whole
    return HFConfig(completed(values, str(kind)))


def yarn_scale(factor: float, weight: float) -> float:
    """YaRN's `mscale` for a stretch factor."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1


def _wrong(name: str, value: object, expected: str) -> CheckpointError:
    return CheckpointError(f"config.json: {name}={value!r} must be {expected}.", CONFIG_HINT)


def _number(values: dict[str, Any], name: str, default: float | None = None) -> float:
    value = values.get(name)
    value = default if value is None else value
    # Compared, not converted: an integer may be too large for a float. NaN compares as false.
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise _wrong(name, value, "a positive number")
    return float(value)


def _numbers(values: dict[str, Any], name: str) -> tuple[float, ...]:
    given = values.get(name)
    if not isinstance(given, list) or not given:
        raise _wrong(name, given, "a list of numbers")
    return tuple(_number({name: v}, name) for v in given)


FILE = "config_defaults.json"
# Fields that are null where they were not given, and older ones that say the same in other words.
_OLDER = {"layers_block_type": "hybrid_override_pattern", "rope_parameters": "rope_scaling"}


def completed(values: dict[str, Any], kind: str) -> dict[str, Any]:
    """The values of a config.json, with the defaults of its `model_type` for missing fields; null stays null."""
    known = _known_defaults()
    kind = known["kinds"].get(kind, kind)
    family = known["families"].get(kind, {"aliases": {}, "defaults": {}})
    renamed = {name: values[alias] for alias, name in family["aliases"].items() if alias in values}
    values = renamed | {name: value for name, value in values.items() if value is not None or name not in _OLDER}
    defaults = {name: value for name, value in family["defaults"].items() if not _given(name, values)}
    return defaults | values


def _given(name: str, values: dict[str, Any]) -> bool:
    return name in values or values.get(_OLDER.get(name, name)) is not None


@functools.cache
def _known_defaults() -> dict[str, Any]:
    known: dict[str, Any] = json.loads(files(__package__).joinpath(FILE).read_text("utf-8"))
    return known
