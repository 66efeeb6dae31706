"""What config.json leaves out is what transformers' configuration classes say, for every family and every field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.errors import BundleError, EdgeInferError
from edgeinfer.export.architectures import find_architecture
from edgeinfer.export.source import hf_config
from edgeinfer.export.source.hf_config import HFConfig, completed, read_config
from tests.export.families.table import FAMILIES, Family
from tests.factories import make_config
from tests.tools.config_defaults import known_defaults, text_config_class


@pytest.mark.slow
def test_the_file_says_what_transformers_says() -> None:
    assert known_defaults() == hf_config._known_defaults(), "run: python -m tests.tools.config_defaults"


def read(values: dict[str, Any]) -> DecoderSpec | None:
    """The decoder; None where it is refused."""
    config = HFConfig(values)
    try:
        return find_architecture(config).read(config, False)
    except (EdgeInferError, BundleError):
        return None


def written(config: Any) -> dict[str, Any]:
    """As transformers writes it."""
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values


# What the classes make of other fields where it is not there.
_RESOLVED = ("layer_types", "mlp_layer_types", "rope_parameters", "head_dim", "num_key_value_heads")


def changes(family: Family) -> Iterator[tuple[str, dict[str, Any]]]:
    """Configurations of a family that leave a field out or have null there."""
    kind = text_config_class(f"{family.name}ForCausalLM")
    fields = sorted({*hf_config._known_defaults()["families"][kind.model_type]["defaults"], *_RESOLVED})
    for settings in family.settings:
        whole = written(make_config(family.name, **settings))
        for name in (name for name in fields if name in whole):
            yield f"{family.name} without {name}", {key: value for key, value in whole.items() if key != name}
            yield f"{family.name} with {name}=null", whole | {name: None}
    yield f"{family.name} without anything", {"architectures": whole["architectures"]}


def differing(family: Family) -> Iterator[str]:
    """Where another decoder is read than transformers' class describes, or none."""
    kind = text_config_class(f"{family.name}ForCausalLM")
    for what, values in changes(family):
        try:
            meant = written(kind.from_dict(dict(values)))
        except (ArithmeticError, AttributeError, ValueError, TypeError, KeyError, StrictDataclassError):
            continue  # transformers cannot do without it either
        expected, found = read(meant), read(completed(values, kind.model_type))
        if expected is not None and found != expected:
            parts = [] if found is None else [n for n, value in vars(found).items() if value != getattr(expected, n)]
            yield f"{what}: {', '.join(parts) or 'refused'}"


@pytest.mark.slow
def test_each_field_may_be_left_out() -> None:
    assert [line for family in FAMILIES for line in differing(family)] == []


def test_what_a_published_gemma_3_does_not_say(tmp_path: Path) -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    config = read_config(tmp_path)
    spec = find_architecture(config).read(config, True)
    assert (spec.vocab_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (262208, 8, 4, 256)
    assert (spec.norm_eps, spec.max_positions, spec.rope.theta, spec.rope.factor) == (1e-6, 131072, 1e6, 8.0)
    assert spec.windows[:6] == (1024,) * 5 + (0,) and spec.more_ropes[0].theta == 1e4
