"""What a reply may be: how its tokens are sampled, how long it is, where it ends and which form it has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from edgeinfer.errors import Setting, UsageError
from edgeinfer.option_groups import OptionGroup
from edgeinfer.options import LARGEST_COUNT, Range, option, require, require_alone, require_few
from edgeinfer.records import dataclass
from edgeinfer.schema_classes import ClassSchema

# What one request may ask for. OpenAI takes 4 stop strings; peers name no limit, and no program in use has 16.
MOST_STOPS, MOST_STOP_CHARACTERS, MOST_STOP_IDS = 16, 1000, 1024
# Each choice is tokenized before a reply begins; characters are of all together.
MOST_CHOICES, MOST_CHOICE_CHARACTERS, MOST_BIASES = 100_000, 4_000_000, 4096

# What the reply must be; one at most.
FORMS = ("choices", "json_schema", "json_object", "regex", "grammar")
_BIAS = Range(-1e6, 1e6)
_TOKEN = Range(0, LARGEST_COUNT, whole=True)
# The heading of help.
_TEXT = "generation"


# What wire=False marks below is read from requests by rules of its own (edgeinfer/openai/fields.py).
@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the next token is drawn.

    Ranges include what OpenAI's, llama.cpp's and vLLM's servers take in earnest, and results stay numbers of 32 bits.
    """

    temperature: float = option(
        0.0,
        help="sampling temperature: 0 always picks the likeliest token, 0.7 is lively, above 1 is wild (default: "
        "what the model's makers recommend for chats, else 0)",
        low=0,
        high=100,
        cli="--temperature",
        metavar="T",
        group=_TEXT,
        basic=True,
        brief="0 is predictable, 0.7 lively (default: model's, or 0)",
    )
    top_k: int = option(
        0,
        help="sample from the K likeliest tokens (default: 0, all)",
        low=0,
        high=LARGEST_COUNT,
        cli="--top-k",
        metavar="K",
        group=_TEXT,
    )
    top_p: float = option(
        1.0,
        help="sample from the likeliest tokens whose probabilities add up to P (default: 1, all)",
        low=0,
        high=1,
        cli="--top-p",
        metavar="P",
        group=_TEXT,
    )
    min_p: float = option(
        0.0,
        help="drop tokens less likely than P times the likeliest one (default: 0, none)",
        low=0,
        high=1,
        cli="--min-p",
        metavar="P",
        group=_TEXT,
    )
    # CTRL's penalty, on tokens of prompt and reply.
    repetition_penalty: float = option(
        1.0,
        help="penalty for tokens that already occurred; above 1 makes them less likely (default: 1)",
        low=0.01,
        high=100,
        cli="--repetition-penalty",
        metavar="X",
        group=_TEXT,
        wire=("repeat_penalty",),
    )
    frequency_penalty: float = option(
        0.0,
        help="subtract X from a token's logit for each time it occurred in the reply (default: 0)",
        low=-100,
        high=100,
        cli="--frequency-penalty",
        metavar="X",
        group=_TEXT,
    )
    presence_penalty: float = option(
        0.0,
        help="subtract X once from the logit of every token that occurred in the reply (default: 0)",
        low=-100,
        high=100,
        cli="--presence-penalty",
        metavar="X",
        group=_TEXT,
    )
    logit_bias: Mapping[int, float] = option(
        factory=dict,
        help="values to add to the logits of the given token ids before anything else",
        cli="--logit-bias",
        metavar="ID=X",
        group=_TEXT,
        wire=False,
    )
    seed: int | None = option(
        None,
        help="random seed; the same seed gives the same text (default: random)",
        low=0,
        high=2**64 - 1,
        cli="--seed",
        metavar="N",
        group=_TEXT,
        wire=False,
    )


@dataclass(frozen=True, kw_only=True)
class Sampling(SamplingOptions, OptionGroup):
    """How the next token is drawn: `model.generate(prompt, sampling=Sampling(temperature=0.7, min_p=0.05))`.

    Attributes:
        temperature: 0 always picks the likeliest token, 0.7 is lively, above 1 is wild.
        top_k: sample from this many of the likeliest tokens; 0 means all.
        top_p: sample from the likeliest tokens whose probabilities add up to this; 0 always picks the likeliest.
        min_p: drop tokens less likely than this times the likeliest one.
        repetition_penalty: above 1 makes tokens of prompt and reply less likely.
        frequency_penalty: subtracted from a token's logit for each time it occurred in the reply.
        presence_penalty: subtracted once from the logit of every token that occurred in the reply.
        logit_bias: values to add to the logits of the given token ids before anything else.
        seed: the same seed gives the same text; None means a new one each time.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_bias(self.logit_bias)


@dataclass(frozen=True, kw_only=True)
class ReplyOptions(SamplingOptions):
    """What a reply may be: how its tokens are drawn, how long it is, where it ends and which form it has."""

    max_tokens: int | None = option(
        None,
        help="maximum number of tokens to generate (default: until the context is full)",
        low=1,
        high=2**63 - 1,
        cli=("-n", "--max-tokens"),
        metavar="N",
        group=_TEXT,
        wire=False,
        basic=True,
    )
    stop: tuple[str, ...] = option(
        (),
        help="end the reply before this text; can be repeated",
        cli="--stop",
        metavar="TEXT",
        group=_TEXT,
    )
    stop_token_ids: tuple[int, ...] = option(
        (),
        help="comma-separated token ids that end the reply, besides the model's own",
        cli="--stop-token-ids",
        metavar="ID,ID",
        group=_TEXT,
    )
    ignore_eos: bool = option(
        False, help="do not stop at the model's end-of-text tokens", cli="--ignore-eos", group=_TEXT
    )
    choices: tuple[str, ...] = option(
        (),
        help="restrict the reply to this text; can be repeated for more choices",
        cli="--choice",
        metavar="TEXT",
        group=_TEXT,
    )
    json_schema: Mapping[str, Any] | str | None = option(
        None,
        help="JSON schema that the reply must match, as a mapping or as text",
        cli="--json-schema",
        metavar="SCHEMA",
        group=_TEXT,
        basic=True,
        brief="JSON schema for the reply: a file, -, or text",
    )
    json_object: bool = option(False, help="restrict the reply to a JSON object", cli="--json-object", group=_TEXT)
    regex: str | None = option(
        None,
        help="regular expression that the whole reply must match",
        cli="--regex",
        metavar="REGEX",
        group=_TEXT,
    )
    grammar: str | None = option(
        None,
        help="grammar that the reply must match, in Lark's notation or GBNF",
        cli="--grammar",
        metavar="FILE",
        group=_TEXT,
    )
    # A program's own code, so that neither requests nor bundles can give one.
    checker: Callable[[str, bool], bool] | None = option(
        None,
        help="function of a text and whether it has ended, which tells whether the reply may begin so, or be that",
        wire=False,
    )
    logprobs: int | None = option(
        None,
        help="return the log-probabilities of the reply's tokens (`Result.logprobs`) and of this many of the "
        "likeliest tokens at each position; True is 0, the reply's tokens alone (default: none)",
        low=0,
        high=20,
        wire=False,
    )
    thinking_budget: int | None = option(
        None,
        help="maximum number of tokens of a thought, such as between <think> and </think>; then its end is forced "
        "(default: none)",
        low=0,
        high=LARGEST_COUNT,
        cli="--thinking-budget",
        metavar="N",
        group=_TEXT,
    )
    parse_special: bool | None = option(
        None,
        help="treat special tokens spelled out in the prompt as special tokens (default: only with --raw)",
        cli="--parse-special",
        group=_TEXT,
    )

    @property
    def follows_grammar(self) -> bool:
        """Whether the reply follows a schema, an expression or a grammar."""
        return self.json_object or (self.json_schema, self.regex, self.grammar) != (None, None, None)

    def check_reply(self) -> None:
        """Refuses texts and token ids of another type, or more of them than a reply needs.

        Options come from HTTP requests as they are; neither a wrong type nor a huge text may fail further inside.

        Raises:
            UsageError: an option has them.
        """
        _check_bias(self.logit_bias)
        require(self.checker is None or callable(self.checker), "checker", self.checker, "a function")
        self._check_texts()
        self._check_tokens()
        forms = [name for name in FORMS if getattr(self, name) not in (None, False, ())]
        require_alone(forms)
        if self.thinking_budget is not None and forms:
            message = (
                Setting("thinking_budget") + " does not go with " + Setting(forms[0]) + ": that leaves no thought."
            )
            raise UsageError(message, "Leave one of them out.")

    def _check_texts(self) -> None:
        schema = ClassSchema.of(self.json_schema)
        object.__setattr__(self, "json_schema", schema)
        require(
            isinstance(schema, Mapping | str | None),
            "json_schema",
            schema,
            "a JSON Schema: an object, its text or a class",
        )
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        for name, texts, rule, most in (
            ("choices", self.choices, "several texts", MOST_CHOICES),
            ("stop", stop, "a string or several", MOST_STOPS),
        ):
            are_texts = isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts)
            require(are_texts, name, texts, rule)
            require_few(name, texts, most)
            object.__setattr__(self, name, tuple(texts))
            require(all(texts), name, texts, "free of empty texts")
        longest = max(map(len, stop), default=0)
        if longest > MOST_STOP_CHARACTERS:
            message = f"A stop string has {longest} characters."
            raise UsageError(message, f"Each string in stop may have at most {MOST_STOP_CHARACTERS}.")
        together = sum(map(len, self.choices))
        if together > MOST_CHOICE_CHARACTERS:
            message = f"The texts in choices have {together} characters together."
            raise UsageError(message, f"They may have at most {MOST_CHOICE_CHARACTERS}.")

    def _check_tokens(self) -> None:
        ids = self.stop_token_ids
        require(isinstance(ids, list | tuple) and all(map(_TOKEN.holds, ids)), "stop_token_ids", ids, "token ids")
        require_few("stop_token_ids", ids, MOST_STOP_IDS)
        object.__setattr__(self, "stop_token_ids", tuple(ids))

    @property
    def parses_prompt(self) -> bool:
        """Whether special tokens spelled out in a prompt that the caller wrote as a whole become those tokens: the text
        of `stream` and `generate`."""
        return self.parse_special is not False

    @property
    def parses_content(self) -> bool:
        """Whether special tokens spelled out in messages, tools, template variables and choices become those tokens."""
        return self.parse_special is True

    @property
    def greedy(self) -> bool:
        """Whether every token is the most likely one."""
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0


def _check_bias(bias: Mapping[int, float]) -> None:
    pairs = isinstance(bias, Mapping) and all(_TOKEN.holds(i) and _is_bias(b) for i, b in bias.items())
    require(pairs, "logit_bias", bias, f"a mapping of token ids to {_BIAS}, or to infinity")
    require_few("logit_bias", bias, MOST_BIASES)


def _is_bias(value: object) -> bool:
    return _BIAS.holds(value) or (isinstance(value, float) and math.isinf(value))
