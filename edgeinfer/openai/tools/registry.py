"""Which format a model's chat template speaks; knows nothing of requests."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edgeinfer.openai.tools.format import ToolFormat
from edgeinfer.openai.tools.hermes import HERMES
from edgeinfer.openai.tools.llama3 import LLAMA3
from edgeinfer.openai.tools.mistral import MISTRAL

__all__ = ["FORMATS", "Dialect", "dialect_of"]

FORMATS = {form.name: form for form in (HERMES, MISTRAL, LLAMA3)}
_TOOLS = re.compile(r"\btools\b")


@dataclass(frozen=True)
class Dialect:
    """How a model is told of functions, and calls them.

    Attributes:
        native: whether its template knows functions; else messages say it all.
    """

    format: ToolFormat
    native: bool


def dialect_of(template: str | None) -> Dialect:
    """The dialect of a chat template's model; Hermes' in messages where the template knows no format of ours."""
    if template is not None and _TOOLS.search(template):
        for form in FORMATS.values():
            if form.known_by(template):
                return Dialect(form, native=True)
    return Dialect(HERMES, native=False)
