"""What is refused of a prompt: nothing, too much, and what is no token."""

from __future__ import annotations

from collections.abc import Sequence

from edgeinfer.errors import ContextLengthError, PromptError
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.wording import Setting

__all__ = ["check_prompt"]


def check_prompt(backend: Backend, prompt: Sequence[int], *, forgets: bool) -> None:
    """Refuses a prompt that a backend cannot continue.

    Args:
        forgets: a context shift makes room for any length.

    Raises:
        PromptError: the prompt is empty, or holds an id that is no token.
        ContextLengthError: the prompt leaves no room for a token.
    """
    if not prompt:
        raise PromptError("The prompt is empty.", "Write at least one token of text.")
    if len(prompt) > backend.cache.capacity and not forgets:
        message = f"The prompt has {len(prompt)} tokens, but the context holds {backend.cache.capacity}."
        hint = "Shorten it, load the model with a larger " + Setting("context") + ", or let it forget with "
        hint += Setting("overflow", "window")
        raise ContextLengthError(message, hint)
    vocabulary = backend.geometry.vocab_size
    if not 0 <= min(prompt) <= max(prompt) < vocabulary:
        message = f"The prompt contains a token id outside the model's vocabulary of {vocabulary}."
        raise PromptError(message, f"Ids range from 0 to {vocabulary - 1}.")
