"""Teaching a method on a text: trains what it reads of a model's bundle, and puts that into the bundle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from edgeinfer.api import load
from edgeinfer.bundle.additions import add_heads
from edgeinfer.bundle.opening import nested_drafter, open_bundle
from edgeinfer.errors import Setting, UsageError
from edgeinfer.hub import resolve
from edgeinfer.options.types import LoadOptions
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.speculation.verification.rule import Lesson, find_verification
from edgeinfer.runtime.tuning.measure import last_state


def tune_method(
    name: str,
    model: str | Path | None,
    text: str,
    *,
    progress: Callable[[int, int], None] | None = None,
    **options: Unpack[LoadOptions],
) -> Mapping[str, Any]:
    """Teach a verification rule on a text, and put what it learned into the model's bundle.

    Args:
        name: of the rule, such as "judge".
        model: bundle directory; None is the built-in model.
        text: what the rule learns from; for "judge" a question in JSON on each line.
        progress: called with the parts done and to do.
        options: as `load` takes them; the draft model is theirs, or the one inside the bundle.

    Returns:
        How well it learned, by name.

    Raises:
        UsageError: the rule learns nothing, the text is not of its form, or there is no draft model.
        CapabilityError: the backend gives no hidden states.
        ModelError: as `load`.
        StorageError: the bundle cannot be written.
    """
    rule, path = find_verification(name), resolve(model)
    if rule.teach is None:
        raise UsageError(f"{name} has nothing to learn.", "It needs no edgeinfer tune.")
    given: dict[str, Any] = {"remember": False, **options, "speculation": "off"}
    small = given.pop("draft_model", None)
    if small is None and (found := nested_drafter(open_bundle(path))) is not None and found.manifest.module is None:
        small = found.path
    if small is None:
        raise UsageError(f"{name} learns from a draft model.", f"Name one with {Setting('draft_model')}.")
    own = {name: given[name] for name in ("threads", "context") if name in given}
    with load(path, **given) as loaded, load(small, speculation="off", remember=False, **own) as drafter:
        if loaded.vocabulary_digest != drafter.vocabulary_digest:
            raise UsageError("The draft model's tokens are not the model's.", "Name one with the same tokenizer.")

        def state(tokens: Sequence[int]) -> Floats:  # (D,)
            with loaded._idle() as parts:
                return last_state(parts.engine, tokens)

        heads, facts = rule.teach(Lesson(text, loaded, drafter, state, progress or (lambda done, total: None)))
    add_heads(path, heads)
    return facts
