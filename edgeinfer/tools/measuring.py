"""Measures a loaded model while no reply is running. Measuring empties its cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from edgeinfer.core.errors import UsageError
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.core.options.types import ReplyDict
from edgeinfer.core.results import PassWork
from edgeinfer.model import Model
from edgeinfer.runtime.backends.expert_use import ExpertCounts
from edgeinfer.runtime.layer_skip.reduced_compute import compute_method
from edgeinfer.runtime.paging.layout import PAGE, PageLayout
from edgeinfer.runtime.tuning import measure
from edgeinfer.runtime.tuning.measure import ReplyReading, WorkTimes
from edgeinfer.runtime.tuning.measure import read_reply as read


def measure_passes(model: Model, sizes: Sequence[int], *, past: int, repeats: int) -> dict[int, list[float]]:
    """c(m): milliseconds of passes over m new tokens with m logit rows after `past` tokens, which the cache holds
    afterwards."""
    with model._replies.idle() as parts:
        return measure.pass_times(parts.sequence, sizes, past=past, repeats=repeats)


def measure_prefill(model: Model, tokens: int, *, repeats: int) -> list[float]:
    """Milliseconds of evaluating a prompt of `tokens` tokens, chunk by chunk; empties the cache."""
    with model._replies.idle() as parts:
        return measure.prefill_times(parts.sequence, tokens, repeats=repeats)


def measure_decode(model: Model, tokens: int, *, past: int) -> list[float]:
    """Milliseconds of each token that is decoded greedily after `past` others; empties the cache."""
    with model._replies.idle() as parts:
        return measure.decode_times(parts.sequence, tokens, past=past)


def measure_work(model: Model, prompt: int, reply: int, *, past: int = 0) -> WorkTimes:
    """Milliseconds of evaluating a prompt behind `past` tokens, and of decoding a reply greedily and plainly, in
    as many passes as tokens; `llama-bench` calls these pp, tg and depth. What the cache holds of the past stays.

    Raises:
        UsageError: there is nothing to do, or the context is too small.
    """
    with model._replies.idle() as parts:
        return measure.work_times(parts.sequence, prompt, reply, past=past)


def pass_work(model: Model, tokens: int, rows: int, *, past: int | None = None) -> PassWork:
    """What a pass over `tokens` new tokens with `rows` logit rows has to do, by the bundle's table of weights;
    attention too with the tokens in the cache before them, where the model says what its layers are."""
    work = measure.pass_work(model._lifecycle.facts.tensors, tokens, rows)
    if past is None:
        return work
    with model._replies.idle() as parts:
        if parts.decoder is None:
            return work
        backend, kv = parts.backend, parts.plan.configuration.kv
        layout = PageLayout.of(backend.geometry, kv) if backend.capabilities.paged else None
        per_token = backend.geometry.kv_bytes_per_token(kv) if layout is None else layout.page_bytes // PAGE
        return work + measure.attention_work(parts.decoder, per_token, tokens, past)


def read_reply(model: Model, prompt: Sequence[int], reply: Sequence[int], **options: Unpack[ReplyDict]) -> ReplyReading:
    """How a reply of given tokens is predicted in a way of computing less (options of `compute`), against the whole
    model. Empties the cache; CapabilityError where the backend cannot compute so."""
    asked = ReplyOptions.of(**options)
    less = asked.compute != "full"
    if less and not compute_method(asked.compute).follows_replies:
        message = f"compute={asked.compute!r} writes a text of its own and cannot read a given reply."
        raise UsageError(message, "Read it with another method, or compare replies.")
    with model._replies.idle() as parts:
        text = parts.sequence
        return read(text, prompt, reply, lambda sampler: parts.reduced.strategy(text, asked, sampler) if less else None)


def drafting_state(model: Model) -> dict[str, Any]:
    """The knowledge of all drafters, for `restore_drafting` before another text is timed."""
    with model._replies.idle() as parts:
        return parts.speculator.state()


def restore_drafting(model: Model, state: Mapping[str, Any]) -> None:
    """Restores the result of `drafting_state`; an empty one makes drafters forget everything."""
    with model._replies.idle() as parts:
        parts.speculator.restore(state)


def expert_counts(model: Model) -> ExpertCounts | None:
    """How many tokens used each expert of each layer since the model was last loaded; None where it has none."""
    watched = model._parts.watched
    return None if watched is None else watched.counts
