"""The memory plan: every term in bytes, before anything is allocated; knows nothing of how passes run.

The terms are upper bounds of resident memory, so a plan that fits is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgeinfer.bundle import Bundle, TensorEntry
from edgeinfer.config import LoadConfig, format_size
from edgeinfer.errors import BudgetError, ContextLengthError
from edgeinfer.runtime.memory import process_memory

__all__ = ["DEFAULT_CONTEXT", "MemoryPlan", "make_plan"]

DEFAULT_CONTEXT = 2048
# Measured (docs/LOG.md, 2026-11-21): resident bytes of a loaded `tokenizers` object per byte of tokenizer.json.
_TOKENIZER_FACTOR = 14
# Session, graph and thread stacks of onnxruntime beyond the import, measured with the smallest bundle.
_SESSION_BYTES = 24 * 1000**2
# Largest set of a layer's activations alive at once, in widths of its widest linear.
_LIVE_WIDTHS = 3


@dataclass(frozen=True)
class MemoryPlan:
    """What a model will take in memory.

    Attributes:
        context: tokens of prompt plus reply the cache may hold.
        prefill_chunk: prompt tokens per pass.
        budget_bytes: the user's budget; None when there is none.
        terms: bytes by name; their sum is `planned_bytes`.
    """

    context: int
    prefill_chunk: int
    budget_bytes: int | None
    terms: dict[str, int]

    @property
    def planned_bytes(self) -> int:
        """Upper bound of the process's resident memory."""
        return sum(self.terms.values())

    @property
    def minimum_bytes(self) -> int:
        """The smallest budget this request would fit."""
        return self.planned_bytes

    @property
    def fits(self) -> bool:
        """Whether the plan is within the budget, or there is none."""
        return self.budget_bytes is None or self.planned_bytes <= self.budget_bytes

    def require_fit(self) -> None:
        """Refuses a plan over its budget.

        Raises:
            BudgetError: carries the terms and the smallest budget that would fit.
        """
        if self.fits:
            return
        assert self.budget_bytes is not None
        largest = max(self.terms, key=lambda name: self.terms[name])
        raise BudgetError(
            f"The plan needs {format_size(self.planned_bytes)}, the budget is {format_size(self.budget_bytes)}.",
            f"Largest term: {largest} {format_size(self.terms[largest])}. Give at least "
            f"{format_size(self.minimum_bytes)}, a smaller context (-c), or a bundle with fewer bits.",
            terms=self.terms,
            minimum_bytes=self.minimum_bytes,
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON object that `edgeinfer plan --json` prints."""
        return {
            "fits": self.fits,
            "budget_bytes": self.budget_bytes,
            "minimum_bytes": self.minimum_bytes,
            "planned_bytes": self.planned_bytes,
            "terms": dict(self.terms),
            "choice": {"context": self.context, "prefill_chunk": self.prefill_chunk},
            "alternatives": [],
        }


def make_plan(bundle: Bundle, config: LoadConfig) -> MemoryPlan:
    """Plans a bundle for a process that has its libraries imported and nothing loaded yet.

    Raises:
        ContextLengthError: the context asked for is larger than the model allows.
    """
    manifest, geometry = bundle.manifest, bundle.manifest.geometry
    longest = geometry.max_positions
    if config.context is not None and config.context > longest:
        message = f"A context of {config.context} tokens was asked for, the model allows {longest}."
        raise ContextLengthError(message, f"Use a context of at most {longest} (-c {longest}).")
    context = config.context or min(DEFAULT_CONTEXT, longest)
    chunk = min(config.prefill_chunk, context)
    decoder = manifest.decoder
    widest = 2 * decoder.intermediate_size + decoder.hidden_size if decoder else 8 * geometry.hidden_size
    scores = chunk * context * 4
    tokenizer = manifest.files["tokenizer.json"].bytes if bundle.has("tokenizer.json") else 0
    terms = {
        "process": process_memory().rss,
        "session": _SESSION_BYTES,
        "weights_packed": sum(_packed_bytes(t) for t in manifest.tensors if t.name != "embed"),
        "weights_mapped": sum(t.nbytes for t in manifest.tensors if t.name == "embed"),
        "kv": geometry.kv_bytes_per_token() * (context + 1),
        "activations": chunk * widest * 4 * _LIVE_WIDTHS + scores,
        "logits": 2 * geometry.vocab_size * 4 + chunk * geometry.hidden_size * 8,
        "tokenizer": tokenizer * _TOKENIZER_FACTOR,
    }
    if not manifest.tensors:
        terms["weights_packed"] = 2 * manifest.weight_bytes
    return MemoryPlan(context, chunk, config.memory, terms)


def _packed_bytes(tensor: TensorEntry) -> int:
    """Resident bytes of a weight packed by onnxruntime: itself, and a float32 sum per block of quantized values."""
    return tensor.nbytes + (tensor.scales.nbytes if tensor.scales is not None else 0)
