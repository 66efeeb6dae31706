"""The request for a reply, and what decodes it: sampler, constraint and strategy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING

from edgeinfer.bundle.additions import read_steering
from edgeinfer.core.errors import Setting, UnshareableError, UsageError
from edgeinfer.core.options.reply import MOST_BIASES, ReplyOptions, steering_in
from edgeinfer.core.records import dataclass
from edgeinfer.core.results import Result
from edgeinfer.lifecycle import ModelParts
from edgeinfer.runtime.decoding.sequence import Strategy
from edgeinfer.runtime.kv_cache.contexts import JoinedContexts
from edgeinfer.runtime.sampling.constraint import ChoiceConstraint, Constraint, TextCheck
from edgeinfer.runtime.sampling.sampler import LogitsProcessor, Sampler
from edgeinfer.runtime.sampling.thinking import ThoughtConstraint, thought_limit
from edgeinfer.runtime.speculation.verification.rule import find_verification
from edgeinfer.runtime.text.contract import bytes_of
from edgeinfer.runtime.text.streaming import CallMark
from edgeinfer.runtime.text.thoughts import ThoughtSplitter, ThoughtStart, ThoughtTags

if TYPE_CHECKING:
    from edgeinfer.runtime.sampling.grammar import GrammarCosts


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    prompt: list[int]  # token ids
    config: ReplyOptions  # how to generate
    started: float = field(default_factory=time.perf_counter)  # time.perf_counter() of the request; by default now
    continues: bool = True  # the reply goes on with the prompt's text, so that a tokenizer's leading space is kept
    reply: tuple[int, ...] = ()  # tokens that it has already
    draft: tuple[int, ...] = ()  # what may follow them
    contexts: JoinedContexts | None = None  # that the prompt begins with, where these were evaluated apart
    calls: CallMark | None = None  # what calls of functions begin with in it
    template: str | None = None  # the source of the chat template; None where there is no chat
    prefill: str = ""  # the end of the prompt, with which the reply of a chat begins
    on_finish: Callable[[Result], None] | None = None  # called once with the result


def make_sampler(
    parts: ModelParts,
    prompt: Sequence[int],
    config: ReplyOptions,
    constraint: Constraint | None,
    stop_ids: frozenset[int],
) -> Sampler:
    """Make the sampler of a reply's tokens; the time is the seed where none is given."""
    if config.checker is not None and not find_verification(config.verification).exact:
        message = Setting("verification", config.verification) + " does not go with a checker."
        raise UsageError(message, "Leave it out: drafts are verified by what is drawn.")
    seed = config.seed if config.seed is not None else time.time_ns()
    processor = LogitsProcessor(config, parts.backend.geometry.vocab_size, seed, partial(bytes_of, parts.tokenizer))
    check = None if config.checker is None else TextCheck(config.checker, parts.tokenizer, stop_ids)
    return Sampler(processor, prompt, constraint, check)


def steered(parts: ModelParts, request: GenerationRequest) -> GenerationRequest:
    """The request with its steering vectors added to its logit biases."""
    config, bundle = request.config, parts.speculator.parts.bundle
    if config.steering is None:
        return request
    assert bundle is not None, "what is loaded to make replies has one"
    bias = dict(config.logit_bias)
    for name, scale in steering_in(config.steering).items():
        vector = read_steering(bundle, name)
        for token, value in zip(vector.tokens.tolist(), vector.values.tolist(), strict=True):
            bias[token] = bias.get(token, 0.0) + scale * value
    if len(bias) > MOST_BIASES:
        message = f"Steering and logit_bias change the odds of {len(bias):,} tokens; at most {MOST_BIASES:,} can be."
        raise UsageError(message, "Leave out a steering vector.")
    return replace(request, config=config.replace(logit_bias=bias, steering=None))


def make_thoughts(parts: ModelParts, request: GenerationRequest) -> ThoughtSplitter | None:
    """Make what tells the thoughts of a chat's reply from its answer; None where there are none to tell."""
    config = request.config
    if request.template is None or config.reasoning_format == "none":
        return None
    tags = ThoughtTags.of(request.template, parts.tokenizer)
    # Calls of a format with headers are read with them.
    if tags is None or (tags.header and request.calls is not None):
        return None
    start = ThoughtStart.after(tags, request.prompt, request.prefill)
    return ThoughtSplitter(tags, start, strict=config.follows_grammar or bool(config.choices))


def make_constraint(
    parts: ModelParts,
    request: GenerationRequest,
    stop_ids: frozenset[int],
    thoughts: ThoughtSplitter | None = None,
    left: int = 0,
) -> tuple[Constraint | None, GrammarCosts | None]:
    """Make the constraint that a reply must follow, if any, and the costs of a grammar. Of a reply of `left` tokens
    that must have a form, a thought before it may take half."""
    config, prompt, tokenizer = request.config, request.prompt, parts.tokenizer
    inner, costs = _form_constraint(parts, config, stop_ids)
    budget = config.thinking_budget
    if thoughts is None or config.search != "off":
        return (
            (inner, costs) if budget is None or inner is not None else (thought_limit(tokenizer, budget, prompt), None)
        )
    if budget is None and inner is not None:
        budget = left // 2
    vocabulary = parts.backend.geometry.vocab_size
    constraint = ThoughtConstraint(
        tokenizer,
        thoughts.tags,
        thoughts.start,
        budget=budget,
        closing=config.thinking_message,
        inner=inner,
        end_ids=stop_ids,
        vocab_size=vocabulary,
        watched=True,
    )
    return constraint, costs


def _form_constraint(
    parts: ModelParts, config: ReplyOptions, stop_ids: frozenset[int]
) -> tuple[Constraint | None, GrammarCosts | None]:
    vocabulary = parts.backend.geometry.vocab_size
    end_ids = [token for token in stop_ids if 0 <= token < vocabulary]
    if config.follows_grammar:
        # Few replies follow one.
        from edgeinfer.runtime.sampling.grammar import GrammarConstraint
        from edgeinfer.runtime.sampling.grammar_source import grammar_source

        source = grammar_source(config)
        assert source is not None, "it was asked for"
        constraint = GrammarConstraint(parts.grammar_vocabulary, source, end_ids)
        return constraint, constraint.costs
    if not config.choices:
        return None, None
    return ChoiceConstraint(parts.choice_lists.trie(config.choices, end_ids, config.parses_content)), None


def make_strategy(
    parts: ModelParts, sampler: Sampler, request: GenerationRequest, stop_ids: frozenset[int]
) -> Strategy:
    """Make the strategy of a request: a search, less compute, drafting, or one token per pass."""
    sequence, config = parts.sequence, request.config
    if parts.remote is not None:
        require_plain(config, remote=True)
        return parts.remote.strategy(sequence, sampler, config)
    if config.search != "off":
        # As few of them search.
        from edgeinfer.runtime.search.strategy import SearchParts, make_search

        given = SearchParts(
            sequence,
            sampler,
            config,
            stop_ids,
            parts.tokenizer,
            continues=request.continues,
            spare_bytes=parts.ledger.plan.spare_bytes,
        )
        return make_search(given, forgets=sequence.context_shift is not None)
    if parts.drafting is not None:
        assert is_shareable(config), "who made the parts has looked"
    elif config.compute != "full":
        return parts.reduced.strategy(sequence, config, sampler)
    return parts.speculator.strategy(sequence, sampler, config, parts.drafting)


def is_shareable(config: ReplyOptions) -> bool:
    """Whether a reply can share passes with others."""
    return config.compute == "full"


def require_shareable(config: ReplyOptions) -> None:
    """Refuse options with which a reply cannot share passes."""
    if not is_shareable(config):
        message = "Replies side by side cannot take less than the whole model."
        raise UnshareableError(message, 'Leave out "compute", or use generate().')


def require_plain(config: ReplyOptions, *, remote: bool = False) -> None:
    """Refuse options by which a reply is not decided token by token, except turns with a server's model (`remote`)."""
    plain = {name: getattr(config, name) is None for name in ("logprobs", "quality_floor", "checker")}
    plain |= {"search": config.search == "off", "verification": find_verification(config.verification).exact}
    if remote and config.compute != "full":
        from edgeinfer.runtime.layer_skip.reduced_compute import compute_method  # few replies compute less

        remote = compute_method(config.compute).remote
    plain["compute"] = config.compute == "full" or remote
    for name, holds in plain.items():
        if not holds:
            message = Setting(name, getattr(config, name)) + " does not go with drafts of another device."
            raise UsageError(message, "Leave it out.")
