"""What a bundle's small files say about text: how it begins and ends, how a chat is written; knows no models."""

from __future__ import annotations

from edgeinfer.bundle import Bundle
from edgeinfer.errors import BundleError
from edgeinfer.runtime.text import ChatTemplate

__all__ = ["boundary_ids", "chat_template"]


def boundary_ids(bundle: Bundle) -> tuple[tuple[int, ...], frozenset[int]]:
    """The tokens that begin a text, one or none, and those that end a reply."""
    config = bundle.read_object("generation_config.json")
    begin, ends = config.get("bos_token_id"), config.get("eos_token_id", [])
    for name, ids in (("bos_token_id", [] if begin is None else [begin]), ("eos_token_id", ends)):
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
            expected = "an id" if name == "bos_token_id" else "a list of ids"
            raise BundleError(f"generation_config.json: {name} must be {expected}.", "Export the bundle again.")
    return () if begin is None else (begin,), frozenset(ends)


def chat_template(bundle: Bundle) -> ChatTemplate | None:
    """The bundle's chat template with its special tokens; None where it has none."""
    if not bundle.has("chat_template.jinja"):
        return None
    special = bundle.read_object("special_tokens.json") if bundle.has("special_tokens.json") else {}
    return ChatTemplate(bundle.read_text("chat_template.jinja"), special)
