"""Options of replies: how tokens are drawn, how long the reply is, where it ends and which form it has."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Protocol, Self

from edgeinfer.core.errors import UsageError
from edgeinfer.core.options import (
    LARGEST_COUNT,
    LARGEST_SIZE,
    FlatOptions,
    OptionGroup,
    Range,
    check_options,
    documented,
    flat_options,
    option,
    require,
    require_alone,
    require_few,
    without_none,
)
from edgeinfer.core.options.decoding import (
    ComputeSettings,
    ReducedCompute,
    ReplyDrafting,
    Search,
    SearchSettings,
    Speculation,
    check_compute,
    check_drafters,
    check_search,
    check_verification,
    compute_option,
    search_option,
    speculation_option,
)
from edgeinfer.core.records import dataclass

# What one request may ask for. OpenAI takes 4 stop strings; peers name no limit, and no program in use has 16.
MOST_STOPS, MOST_STOP_CHARACTERS, MOST_STOP_IDS = 16, 1000, 1024
_LONGEST_BREAKER = 40  # llama.cpp's
# Each choice is tokenized before a reply begins; characters are of all together.
MOST_CHOICES, MOST_CHOICE_CHARACTERS, MOST_BIASES = 100_000, 4_000_000, 4096
# Forms that a reply may have to follow; one at most.
FORMS = ("choices", "json_schema", "json_object", "regex", "grammar")
_BIAS = Range(-1e6, 1e6)
_TOKEN = Range(0, LARGEST_COUNT, whole=True)
# Steering vectors of a reply, and how far each may be scaled.
_MOST_VECTORS, _SCALE = 8, Range(-100, 100)

# Declares options under the heading of help.
_text = partial(option, group="generation")


# Options with wire=False are read from requests by rules of their own (edgeinfer/openai/fields.py).
@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the next token is drawn. Ranges include what OpenAI's, llama.cpp's and vLLM's servers really take, and
    results stay numbers of 32 bits."""

    temperature: float = _text(
        0.0,
        "sampling temperature: 0 always picks the likeliest token, 0.7 is lively, above 1 is wild (default: what the "
        "model's makers recommend for chats, else 0)",
        0,
        100,
        "T",
        basic=True,
        brief="0 is predictable, 0.7 lively (default: model's, or 0)",
    )
    top_k: int = _text(0, "sample from the K likeliest tokens (default: 0, all)", 0, metavar="K")
    top_p: float = _text(
        1.0, "sample from the likeliest tokens whose probabilities add up to P (default: 1, all)", 0, 1, "P"
    )
    min_p: float = _text(0.0, "drop tokens less likely than P times the likeliest one (default: 0, none)", 0, 1, "P")
    top_n_sigma: float = _text(
        0.0,
        "drop tokens whose logits are more than X standard deviations below the largest (default: 0, none)",
        -1,
        100,
    )
    # llama.cpp's, as the next.
    xtc_probability: float = _text(0.0, "chance with which XTC excludes top choices (default: 0)", 0, 1, "P")
    xtc_threshold: float = _text(
        0.1, "probability from which XTC excludes tokens, all but the least likely of them (default: 0.1)", 0, 1, "P"
    )
    dynatemp_range: float = _text(
        0.0,
        "how far the temperature goes down where few tokens are likely, and up where many are (default: 0)",
        0,
        100,
    )
    dynatemp_exponent: float = _text(1.0, "exponent of the entropy that dynatemp_range follows (default: 1)", 0, 100)
    # CTRL's penalty, on tokens of prompt and reply.
    repetition_penalty: float = _text(
        1.0,
        "penalty for tokens that already occurred; above 1 makes them less likely (default: 1)",
        0.01,
        100,
        wire=("repeat_penalty",),
    )
    frequency_penalty: float = _text(
        0.0, "subtract X from a token's logit for each time it occurred in the reply (default: 0)", -100, 100
    )
    presence_penalty: float = _text(
        0.0, "subtract X once from the logit of every token that occurred in the reply (default: 0)", -100, 100
    )
    # DRY, as llama.cpp has it.
    dry_multiplier: float = _text(
        0.0, "penalty on tokens that would repeat what the text said before, such as 0.8 (default: 0, none)", 0, 100
    )
    dry_base: float = _text(
        1.75, "factor by which that penalty grows with each token of the repeat (default: 1.75)", 1, 100
    )
    dry_allowed_length: int = _text(2, "tokens of a repeat that the penalty still allows (default: 2)", 0)
    dry_penalty_last_n: int = _text(
        -1, "tokens of prompt and reply in which repeats are looked for; -1 is all, 0 none (default: -1)", -1
    )
    dry_sequence_breakers: tuple[str, ...] = _text(
        ("\n", ":", '"', "*"),
        "a text that no repeat goes across; can be repeated (default: a line end, a colon, a quotation mark, a star)",
        metavar="TEXT",
        flag="--dry-sequence-breaker",
        given="Sequence[str]",
    )
    logit_bias: Mapping[int, float] = _text(
        factory=dict,
        help="values to add to the logits of the given token ids before anything else",
        metavar="ID=X",
        wire=False,
    )
    seed: int | None = _text(
        None, "random seed; the same seed gives the same text (default: random)", 0, 2**64 - 1, wire=False
    )


@documented
@dataclass(frozen=True, kw_only=True)
class Sampling(SamplingOptions, OptionGroup):
    """How the next token is drawn: `model.generate(prompt, sampling=Sampling(temperature=0.7, min_p=0.05))`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_bias(self.logit_bias)
        object.__setattr__(self, "dry_sequence_breakers", _breakers(self.dry_sequence_breakers))


class SchemaClass(Protocol):
    """A class like pydantic's models."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        """Its JSON Schema."""

    @classmethod
    def model_validate_json(cls, json_data: str, /) -> Any:
        """An instance from a text of JSON."""


class ClassSchema(dict[str, Any]):
    """The JSON Schema of a class, with the class."""

    schema_class: type[SchemaClass] | None = None

    @classmethod
    def of(cls, schema: Any) -> Any:
        """The schema of a class; anything else is returned as it is."""
        if isinstance(schema, cls) or not callable(getattr(schema, "model_json_schema", None)):
            return schema
        made = cls(schema.model_json_schema())
        made.schema_class = schema
        return made


@documented
@dataclass(frozen=True, kw_only=True)
class ReplyOptions(SamplingOptions, SearchSettings, ComputeSettings, ReplyDrafting, FlatOptions):
    """How text is generated: how tokens are drawn, drafted and searched for, what the reply may be, and how much of the
    model each token takes. Defaults give greedy decoding."""

    kind: ClassVar[str] = "generation option"
    taken_by: ClassVar[str] = "generate() or stream()"

    max_tokens: int | None = _text(
        None,
        "maximum number of tokens to generate (default: until the context is full)",
        1,
        LARGEST_SIZE,
        short="-n",
        wire=False,
        basic=True,
    )
    stop: tuple[str, ...] = _text(
        (), "end the reply before this text; can be repeated", metavar="TEXT", given="str | Sequence[str]"
    )
    stop_token_ids: tuple[int, ...] = _text(
        (),
        "comma-separated token ids that end the reply, in addition to the model's own",
        metavar="ID,ID",
        given="Sequence[int]",
    )
    ignore_eos: bool = _text(False, "do not stop at the model's end-of-text tokens")
    choices: tuple[str, ...] = _text(
        (),
        "restrict the reply to this text; can be repeated for more choices",
        metavar="TEXT",
        flag="--choice",
        given="Sequence[str]",
    )
    json_schema: Mapping[str, Any] | str | None = _text(
        None,
        "JSON schema that the reply must match, as a mapping or as text",
        metavar="SCHEMA",
        basic=True,
        brief="JSON schema for the reply: a file, -, or text",
        given="JsonSchema",
    )
    json_object: bool = _text(False, "restrict the reply to a JSON object")
    regex: str | None = _text(None, "regular expression that the whole reply must match", metavar="REGEX")
    grammar: str | None = _text(None, "grammar that the reply must match, in Lark's notation or GBNF", metavar="FILE")
    # A program's own code, so that neither requests nor bundles can give one.
    checker: Callable[[str, bool], bool] | None = option(
        None,
        "function of a text and whether it has ended, which tells whether the reply may begin with it, or be it",
        cli=False,
        wire=False,
    )
    logprobs: int | None = option(
        None,
        "return the log-probabilities of the reply's tokens (`Result.logprobs`) and of this many of the likeliest "
        "tokens at each position; True is 0, the reply's tokens alone (default: none)",
        0,
        20,
        cli=False,
        wire=False,
        given="int",
    )
    thinking_budget: int | None = _text(
        None,
        "maximum number of tokens of a thought, such as between <think> and </think>; then its end is forced "
        "(default: none)",
        0,
        wire=("reasoning_budget_tokens", "thinking_budget_tokens"),
    )
    thinking_message: str = _text(
        "",
        "text to write at the end of a thought that is cut short (default: none)",
        metavar="TEXT",
        wire=("reasoning_budget_message",),
    )
    reasoning_format: str = _text(
        "auto",
        "none leaves the thoughts of a chat's reply in its text (default: auto, which tells them apart)",
        choices=("auto", "none"),
    )
    parse_special: bool | None = _text(
        None, "treat special tokens spelled out in the prompt as special tokens (default: only with --raw)"
    )
    search: str = search_option()
    compute: str = compute_option()
    speculation: str = speculation_option()
    adapter: str | None = option(
        None, "name of the adapter to use, of those that --lora names (default: none)", metavar="NAME", group="model"
    )
    steering: str | None = option(
        None,
        "steering vectors of the model's bundle to add to its logits, and how strongly, such as story:1.5,terse "
        "(default: none)",
        metavar="NAME:X",
        group="model",
    )

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Options as callers write them, alone or in groups, which are objects or mappings; UsageError where one is
        wrong."""
        options = flat_options(options, REPLY_GROUPS)
        if isinstance(options.get("logprobs"), bool):  # as OpenAI writes it: those of the tokens alone, or none
            options["logprobs"] = 0 if options["logprobs"] else None
        cls.require_known(options)
        config = cls(**without_none(options))
        # An empty list of candidates would give any text at all.
        given = options.get("choices")
        require(given is None or len(config.choices) > 0, "choices", given, "a list of at least one text")
        return config

    @classmethod
    def for_chat(cls, recommended: Mapping[str, Any], options: Mapping[str, Any]) -> Self:
        """Options of a reply to messages: the makers' of the model, and what the caller gives instead. A search has its
        own way to choose tokens and takes none of the makers'."""
        given = without_none(flat_options(options, REPLY_GROUPS))
        return cls.of(**given) if given.get("search", "off") != "off" else cls.of(**{**recommended, **given})

    def replace(self, **changes: Any) -> Self:
        """A copy with some options changed; errors as `of`."""
        changes = flat_options(changes, REPLY_GROUPS)
        self.require_known(changes)
        return dataclasses.replace(self, **changes)

    # Options come from HTTP requests as they are; neither a wrong type nor a huge text may fail further inside.
    def __post_init__(self) -> None:
        check_options(self)
        check_drafters(self.speculation)
        check_verification(self.verification)
        self._check_form()
        self._check_texts()
        self._check_tokens()
        check_compute(self.compute, self)
        check_search(self.search, self)
        require(isinstance(self.steering, str | None), "steering", self.steering, "names of vectors with their scales")
        steering_in(self.steering)
        modes = [name for name, usual in (("compute", "full"), ("search", "off")) if getattr(self, name) != usual]
        modes += ["speculation"] if modes and self.speculation not in ("auto", "off") else []
        require_alone(modes)

    def _check_form(self) -> None:
        require(self.checker is None or callable(self.checker), "checker", self.checker, "a function")
        schema = ClassSchema.of(self.json_schema)
        object.__setattr__(self, "json_schema", schema)
        rule = "a JSON Schema: an object, its text or a class"
        require(isinstance(schema, Mapping | str | None), "json_schema", schema, rule)
        forms = [name for name in FORMS if getattr(self, name) not in (None, False, ())]
        require_alone(forms)

    def _check_texts(self) -> None:
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
        _check_bias(self.logit_bias)
        object.__setattr__(self, "dry_sequence_breakers", _breakers(self.dry_sequence_breakers))
        ids = self.stop_token_ids
        require(isinstance(ids, list | tuple) and all(map(_TOKEN.holds, ids)), "stop_token_ids", ids, "token ids")
        require_few("stop_token_ids", ids, MOST_STOP_IDS)
        object.__setattr__(self, "stop_token_ids", tuple(ids))

    @property
    def follows_grammar(self) -> bool:
        """Whether the reply follows a schema, an expression or a grammar."""
        return self.json_object or (self.json_schema, self.regex, self.grammar) != (None, None, None)

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


# Groups of options, by the names under which callers give them.
REPLY_GROUPS: dict[str, type[OptionGroup]] = {
    "sampling": Sampling,
    "speculation": Speculation,
    "search": Search,
    "compute": ReducedCompute,
}


def steering_in(text: str | None) -> dict[str, float]:
    """The scales of the steering vectors that a text names, such as "story:1.5,terse"; without one it is 1."""
    found: dict[str, float] = {}
    for part in [] if text is None else text.split(","):
        name, colon, scale = part.strip().partition(":")
        try:
            number = float(scale) if colon else 1.0
        except ValueError:
            number = math.nan
        valid = bool(name) and name not in found and _SCALE.holds(number)
        require(valid, "steering", text, "names with scales from -100 to 100, each name once, such as story:1.5,terse")
        found[name] = number
    require(len(found) <= _MOST_VECTORS, "steering", text, f"no more than {_MOST_VECTORS} vectors")
    return found


def _breakers(texts: Any) -> tuple[str, ...]:
    """Texts that no repeat goes across, checked."""
    name, given = "dry_sequence_breakers", (texts,) if isinstance(texts, str) else texts
    valid = isinstance(given, list | tuple) and all(isinstance(text, str) and text for text in given)
    require(valid, name, texts, "a list of texts, none empty")
    require_few(name, given, MOST_STOPS)
    require(
        all(len(text) <= _LONGEST_BREAKER for text in given), name, texts, f"of {_LONGEST_BREAKER} characters at most"
    )
    return tuple(given)


def _check_bias(bias: Mapping[int, float]) -> None:
    pairs = isinstance(bias, Mapping) and all(_TOKEN.holds(i) and _is_bias(b) for i, b in bias.items())
    require(pairs, "logit_bias", bias, f"a mapping of token ids to {_BIAS}, or to infinity")
    require_few("logit_bias", bias, MOST_BIASES)


def _is_bias(value: object) -> bool:
    return _BIAS.holds(value) or (isinstance(value, float) and math.isinf(value))
