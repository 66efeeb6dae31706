"""transformers on a Hugging Face checkpoint: passes with a DynamicCache, as its `generate` makes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from edgeinfer.apps.bench.engines.stepped import SteppedEngine

__all__ = ["TransformersEngine"]


class TransformersEngine(SteppedEngine):
    """In float32 also the judge of what the others say.

    Args:
        dtype: of weights and arithmetic, as torch calls it.
    """

    def __init__(self, path: str, threads: int, context: int, dtype: str = "float32") -> None:
        super().__init__()
        torch = self._torch = import_module("torch")
        torch.set_num_threads(threads)
        library = import_module("transformers")
        library.logging.disable_progress_bar()
        self.version = str(library.__version__)
        model = library.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), local_files_only=True)
        self._model = model.eval()
        self._new_cache: Callable[[], Any] = partial(library.DynamicCache, config=model.config)
        self._cache = self._new_cache()
        self._logits: Any = None

    def take(self, tokens: list[int], rows: int) -> None:
        """See SteppedEngine; it always computes a row at least."""
        with self._torch.inference_mode():
            ids = self._torch.tensor([tokens])
            # 0 would be all of them.
            out = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=max(rows, 1))
        self._logits = out.logits[0]

    def choices(self, rows: int) -> list[int]:
        """See SteppedEngine."""
        found: list[int] = self._logits.argmax(dim=-1).tolist()
        return found

    def truncate(self, length: int) -> None:
        """See SteppedEngine."""
        if length == 0:
            self._cache = self._new_cache()
        elif length < len(self._taken):
            # Negative: so many less; the number that are to be left is no longer taken.
            self._cache.crop(length - len(self._taken))

    def judge(self, prompt: list[int], reply: list[int]) -> list[float]:
        """How far each token of a reply is from the likeliest at its place: 0 is the likeliest, 1 no better than the
        mean of all tokens, more is worse."""
        self._truncate(0)
        self._take([*prompt, *reply[:-1]], len(reply))
        logits = self._logits.double()
        best, mean = logits.max(dim=-1).values, logits.mean(dim=-1)
        chosen = logits.gather(1, self._torch.tensor(reply)[:, None])[:, 0]
        found: list[float] = ((best - chosen) / (best - mean)).tolist()
        return found
