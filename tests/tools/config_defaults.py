"""Writes export/source/config_defaults.json: the defaults of transformers' configuration classes.

python -m tests.tools.config_defaults
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import transformers

from edgeinfer.export.architectures import ARCHITECTURES
from edgeinfer.export.source.hf_config import FILE

_EXPORT = Path(__file__).parents[2] / "export"
# What ends a text is said by generation_config.json and the tokenizer, and whether a head is tied by the tensors.
_TOLD_ELSEWHERE = {"tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"}
_ROTATION, _OTHER_THETA = "rope_parameters", 77.0
# Names that the code puts together.
_PUT_TOGETHER = re.compile(r"linear_\w+|(ssm|attention)_out_multiplier")
_KINDS = "layers_block_type"
# Older names that transformers' classes read without listing them.
_OLDER = {
    "nemotron_h": {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias"}
    | {"mamba_dt_min": "time_step_min", "mamba_dt_limit": "time_step_limit"},
}


def text_config_class(model: str) -> Any:
    """The configuration class of a model class, or of the language model in it; None if transformers has none."""
    found = getattr(transformers, model, None)
    if found is None:
        return None
    inner = found.config_class.sub_configs.get("text_config", found.config_class)
    return type(found.config_class().text_config) if inner is transformers.AutoConfig else inner


def known_defaults() -> dict[str, Any]:
    """The contents of the file."""
    kinds, families = {}, {}
    for model in (name for family in ARCHITECTURES for name in family.classes):
        config = text_config_class(model)
        if config is None:
            continue
        kind = config.model_type
        outer = getattr(transformers, model).config_class.model_type
        if outer != kind:
            kinds[outer] = kind
        families[kind] = {
            "aliases": {a: name for a, name in config.attribute_map.items() if _is_read(name)} | _OLDER.get(kind, {}),
            "defaults": {name: value for name, value in sorted(_defaults(config).items()) if _is_read(name)},
        }
    known = {"kinds": dict(sorted(kinds.items())), "families": dict(sorted(families.items()))}
    plain: dict[str, Any] = json.loads(json.dumps(known))
    return plain


@functools.cache
def _named() -> set[str]:
    """Names in the code that reads configurations."""
    sources = [path for folder in ("architectures", "source", "gguf") for path in (_EXPORT / folder).glob("*.py")]
    named = set(re.findall(r'"([A-Za-z_0-9]+)"', "".join(path.read_text("utf-8") for path in sources)))
    return named - _TOLD_ELSEWHERE


def _is_read(field: str) -> bool:
    return field in _named() or _PUT_TOGETHER.fullmatch(field) is not None


def _defaults(config: Any) -> dict[str, Any]:
    """The fields of one class that are not null; lists with an item for each layer are left to the code."""
    fields = {field.name: field.default for field in dataclasses.fields(config) if field.name != _ROTATION}
    found = {config.attribute_map.get(name, name): value for name, value in fields.items()}
    if hasattr(config, _ROTATION):
        found |= _rotation(config)
    if _KINDS in fields:
        found[_KINDS] = getattr(config(), _KINDS)
    return {name: value for name, value in found.items() if value not in (None, dataclasses.MISSING)}


def _rotation(config: Any) -> dict[str, Any]:
    bases = config.default_theta if isinstance(config.default_theta, dict) else {"global": config.default_theta}
    found = {"rope_theta": bases["global"], "rope_local_base_freq": bases.get("local")}
    rotation, other = config().rope_parameters, config(rope_theta=_OTHER_THETA).rope_parameters
    if other.get("rope_theta") == _OTHER_THETA:
        del rotation["rope_theta"]
    scaled = rotation.get("rope_type", "") != "default"
    if scaled and len(bases) == 1:
        return found | {_ROTATION: rotation}
    return found | {"partial_rotary_factor": rotation.get("partial_rotary_factor")}


def main() -> None:
    """Write the file."""
    known = known_defaults()
    lines = ",\n".join(f"  {json.dumps(kind)}: {json.dumps(family)}" for kind, family in known["families"].items())
    text = f'{{\n "kinds": {json.dumps(known["kinds"])},\n "families": {{\n{lines}\n }}\n}}\n'
    (_EXPORT / "source" / FILE).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
