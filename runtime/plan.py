"""The memory plan: every term in bytes, before anything is allocated; knows nothing of how passes run.

The terms are upper bounds of resident memory, so a plan that fits is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgeinfer.bundle import NATIVE, PORTABLE, Bundle, Layout, Manifest, TensorEntry
from edgeinfer.bundle.tables import stored_tensors, tensors_in
from edgeinfer.config import LoadConfig, format_size
from edgeinfer.errors import BudgetError, ContextLengthError
from edgeinfer.runtime.memory import process_memory
from edgeinfer.runtime.speculation.memory import draft_lengths, drafting_bytes

__all__ = ["DEFAULT_CONTEXT", "MemoryPlan", "make_plan"]

DEFAULT_CONTEXT = 2048
# Constants measured in docs/LOG.md, 2026-11-21. A loaded tokenizer: bytes in all, and per byte of tokenizer.json; what
# parsing it takes on the way, per byte.
_TOKENIZER_BYTES, _TOKENIZER_FACTOR, _TOKENIZER_PARSING = 6_000_000, 9, 21
# Session, graph and touched code of onnxruntime beyond its import.
_SESSION_BYTES = 28_000_000
# What importing and planning itself add to the process between two plans.
_GROWTH_BYTES = 4_000_000
# A cache that grows by concatenation is written anew by every pass, from one copy into the other.
_CONCAT_COPIES = 2
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
        layout: the layout of weights that runs.
        draft_max: tokens in a draft at most; 0 is no speculation.
    """

    context: int
    prefill_chunk: int
    budget_bytes: int | None
    terms: dict[str, int]
    layout: Layout
    draft_max: int = 0

    @property
    def planned_bytes(self) -> int:
        """Upper bound of the process's resident memory."""
        return sum(self.terms.values())

    @property
    def minimum_bytes(self) -> int:
        """The smallest budget this request would fit, with room for what the process grows by until it is loaded."""
        return self.planned_bytes + _GROWTH_BYTES

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
            "choice": {
                "context": self.context,
                "prefill_chunk": self.prefill_chunk,
                "layout": self.layout,
                "draft_max": self.draft_max,
            },
            "alternatives": [],
        }


def make_plan(
    bundle: Bundle, config: LoadConfig, layout: Layout | None = None, drafter: tuple[Bundle, Layout] | None = None
) -> MemoryPlan:
    """Plans a bundle for a process that has its libraries imported and nothing loaded yet.

    Where `speculation` is "auto", drafts get shorter, down to none, before a plan exceeds its budget.

    Args:
        layout: the layout of weights that will run; None is the one the bundle stores.
        drafter: a small model that drafts for it, and the layout of its weights.

    Raises:
        ContextLengthError: the context asked for is larger than the model allows.
    """
    context = _context(bundle.manifest, config)
    chunk = min(config.prefill_chunk, context)
    layout = layout or bundle.manifest.layout
    process = _process_bytes()
    for draft_max in draft_lengths(config):
        terms = _terms(bundle, layout, context, chunk)
        if draft_max:
            terms["drafting"] = drafting_bytes(config, bundle.manifest.geometry, context, draft_max)
        if draft_max and drafter is not None:
            small, its_layout = drafter
            own = _terms(small, its_layout, min(context, small.manifest.geometry.max_positions), chunk)
            terms["draft_model"] = sum(own.values()) - own["tokenizer"]
        # The tokenizer is parsed before anything else is there; only what that takes beyond all the rest counts.
        parsing = (_TOKENIZER_FACTOR + _TOKENIZER_PARSING) * _tokenizer_bytes(bundle) - sum(terms.values())
        if parsing > 0:
            terms["tokenizer_parsing"] = parsing
        plan = MemoryPlan(context, chunk, config.memory, {"process": process} | terms, layout, draft_max)
        if plan.fits:
            break
    return plan


def _context(manifest: Manifest, config: LoadConfig) -> int:
    longest = manifest.geometry.max_positions
    if config.context is not None and config.context > longest:
        message = f"A context of {config.context} tokens was asked for, the model allows {longest}."
        raise ContextLengthError(message, f"Use a context of at most {longest} (-c {longest}).")
    return config.context or min(DEFAULT_CONTEXT, longest)


def _terms(bundle: Bundle, layout: Layout, context: int, chunk: int) -> dict[str, int]:
    """Bytes of one model by term."""
    manifest = bundle.manifest
    return {
        "session": _SESSION_BYTES,
        **_weights(manifest, layout),
        "kv": manifest.geometry.kv_bytes_per_token() * (context + 1) * (1 if manifest.decoder else _CONCAT_COPIES),
        "activations": _activations(manifest, chunk, context),
        "tokenizer": _TOKENIZER_BYTES + _TOKENIZER_FACTOR * _tokenizer_bytes(bundle),
    }


def _tokenizer_bytes(bundle: Bundle) -> int:
    return bundle.manifest.files["tokenizer.json"].bytes if bundle.has("tokenizer.json") else 0


def _process_bytes() -> int:
    """Resident bytes of the process with the libraries that loading will import."""
    import onnxruntime  # noqa: F401 - measured, not used

    return process_memory().rss


def _weights(manifest: Manifest, layout: Layout) -> dict[str, int]:
    """Anonymous bytes of packed weights, and file pages that stay mapped."""
    if not manifest.tensors:
        # An opaque graph: float weights are packed into a copy while the file is mapped.
        return {"weights_packed": manifest.weight_bytes, "weights_mapped": manifest.weight_bytes}
    packed, mapped = _WEIGHTS[layout](tensors_in(manifest, layout))
    return {"weights_packed": packed, "weights_mapped": mapped}


def _portable_weights(tensors: Sequence[TensorEntry]) -> tuple[int, int]:
    """All matrices are packed into copies but the embedding, whose rows stay mapped, as all scales do."""
    packed = sum(t.nbytes + _scale_bytes(t) for t in tensors if t.name != "embed")
    return packed, sum(t.nbytes if t.name == "embed" else _scale_bytes(t) for t in tensors)


def _native_weights(tensors: Sequence[TensorEntry]) -> tuple[int, int]:
    """The file is used in place; what is not quantized is multiplied by onnxruntime, which packs a copy."""
    packed = sum(t.nbytes for t in tensors if t.bits == 32 and t.name != "embed")
    return packed, sum(t.nbytes for t in stored_tensors(tensors))


_WEIGHTS: dict[Layout, Callable[[Sequence[TensorEntry]], tuple[int, int]]] = {
    NATIVE: _native_weights,
    PORTABLE: _portable_weights,
}


def _scale_bytes(tensor: TensorEntry) -> int:
    """Bytes of the scales; packing adds as much again, a float32 sum per block of quantized values."""
    return tensor.scales.nbytes if tensor.scales is not None else 0


def _activations(manifest: Manifest, chunk: int, context: int) -> int:
    """Bytes alive in the largest pass: hidden states in and out, a layer's widest values, attention bias, logits."""
    geometry, decoder = manifest.geometry, manifest.decoder
    hidden = geometry.hidden_size
    if decoder is None:
        # An opaque graph returns the logits of every row, and its attention holds the scores of every head.
        heads = -(-hidden // geometry.head_dim)
        scores = _LIVE_WIDTHS * heads * chunk * context
        return 4 * (chunk * (_LIVE_WIDTHS * 8 * hidden + geometry.vocab_size) + scores)
    widest = 2 * decoder.intermediate_size + hidden
    biases = 2 if decoder.window_size else 1
    return 4 * (chunk * (2 * hidden + _LIVE_WIDTHS * widest + biases * context) + 2 * geometry.vocab_size)
