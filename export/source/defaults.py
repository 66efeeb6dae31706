"""What config.json leaves out, filled in as transformers fills it in; config_defaults.json has the values.

`python -m tests.tools.config_defaults` writes that file from transformers' own configuration classes.
"""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from typing import Any

FILE = "config_defaults.json"
# Fields that are null where they were not given, and older ones that say the same in other words.
_OLDER = {"layers_block_type": "hybrid_override_pattern", "rope_parameters": "rope_scaling"}


def completed(values: dict[str, Any], kind: str) -> dict[str, Any]:
    """The values of a config.json and, of the fields that it leaves out, the defaults of its kind.

    A number that is null stays so, which often means something else than the default.

    Args:
        kind: transformers' name of the family, `model_type`; where the models also see, of their language model.
    """
    known = _known()
    kind = known["kinds"].get(kind, kind)
    family = known["families"].get(kind, {"aliases": {}, "defaults": {}})
    renamed = {name: values[alias] for alias, name in family["aliases"].items() if alias in values}
    values = renamed | {name: value for name, value in values.items() if value is not None or name not in _OLDER}
    defaults = {name: value for name, value in family["defaults"].items() if not _given(name, values)}
    return defaults | values


def _given(name: str, values: dict[str, Any]) -> bool:
    return name in values or values.get(_OLDER.get(name, name)) is not None


@functools.cache
def _known() -> dict[str, Any]:
    known: dict[str, Any] = json.loads(files(__package__).joinpath(FILE).read_text("utf-8"))
    return known
