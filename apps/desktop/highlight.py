"""Syntax highlighting in one pass over the code.

Lexers by regular expressions take quadratic time and more on hostile text. Here every character is read a bounded
number of times: repetitions are possessive (`*+`), and unclosed strings or comments extend to the end of the line or
text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from typing import Any

_SLASHES, _HASH, _DASHES = r"//[^\n]*+", r"#[^\n]*+", r"--[^\n]*+"
_BLOCK = r"/\*(?:[^*]|\*(?!/))*+(?:\*/)?+"
_QUOTES = r""""(?:[^"\\\n]|\\[^\n])*+"?+|'(?:[^'\\\n]|\\[^\n])*+'?+"""
_DOUBLE = r'"(?:[^"\\\n]|\\[^\n])*+"?+'
_BACKTICKS = r"`(?:[^`\\]|\\[\s\S])*+`?+"
_TRIPLE = r'"""(?:[^"\\]|\\[\s\S]|"(?!""))*+(?:""")?+|' + r"'''(?:[^'\\]|\\[\s\S]|'(?!''))*+(?:''')?+"
_NUMBER = r"(?P<m>(?<!\w)\d[\w.]*+)"
_WORD = r"(?P<w>[^\W\d][\w$]*+)"
_DASHED = r"(?P<w>[^\W\d][\w-]*+)"


@dataclass(frozen=True)
class _Language:
    """The lexical rules of a language."""

    pattern: re.Pattern[str]  # each match is of one group, named by its CSS class; "w" is a word
    classes: dict[str, str]  # of words
    keys: str = ""  # characters that follow the name of a value
    folds: bool = False  # whether words are case-insensitive


def _language(
    comment: str, text: str, *others: str, k: str = "", kc: str = "true false null", nb: str = "", **rules: Any
) -> _Language:
    """A language by the patterns of its comments, texts and whatever else it has, and its words by class."""
    classes = {word: name for name, words in (("nb", nb), ("kc", kc), ("k", k)) for word in words.split()}
    pattern = "|".join((f"(?P<c>{comment})", f"(?P<s>{text})", *others))
    return _Language(re.compile(pattern, re.MULTILINE), classes, **rules)


_PLAIN = (_NUMBER, _WORD)
_C_COMMENT = f"{_SLASHES}|{_BLOCK}"
_C_LIKE = (_C_COMMENT, _QUOTES, _NUMBER, r"(?P<cp>^[ \t]*+\#\w++)", r"(?P<nd>@\w++)", _WORD)
_IN_MOST = "if else for while do switch case default break continue return"
_CLASSES = (
    "class interface enum extends implements new this super try catch finally throw public private protected static "
    "final abstract import package void instanceof override"
)
_TYPES = "int long short char float double bool boolean byte string size_t unsigned signed"

_PYTHON = _language(
    *(_HASH, f"{_TRIPLE}|{_QUOTES}", _NUMBER, r"(?P<nd>@[\w.]++)", _WORD),
    k="and as assert async await break class continue def del elif else except finally for from global if import in is "
    "lambda match case nonlocal not or pass raise return try while with yield",
    kc="True False None",
    nb="abs all any bool bytes dict enumerate filter float int isinstance len list map max min object open print range "
    "repr reversed round self set sorted str sum super tuple type zip",
)
_JAVASCRIPT = _language(
    *(_C_COMMENT, f"{_QUOTES}|{_BACKTICKS}", _NUMBER, r"(?P<nd>@\w++)", _WORD),
    k=f"{_IN_MOST} {_CLASSES} var let const function async await yield of in typeof delete export from as type "
    "readonly declare namespace keyof",
    kc="true false null undefined NaN",
    nb="Array Boolean Date Error JSON Map Math Number Object Promise RegExp Set String Symbol console document window "
    "string number boolean any unknown never",
)
_C = _language(
    *_C_LIKE,
    k=f"{_IN_MOST} {_CLASSES} struct union typedef const extern goto sizeof inline volatile register template typename "
    "namespace using virtual operator delete auto constexpr nullptr friend noexcept",
    kc="true false NULL nullptr",
    nb=f"{_TYPES} int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t std vector map",
)
_JAVA = _language(
    *_C_LIKE,
    k=f"{_IN_MOST} {_CLASSES} var val fun def object when is in as trait sealed data record namespace using get set "
    "async await const readonly ref out yield lambda late required dynamic mixin with",
    nb=f"{_TYPES} String Integer List Map Set Object Int Long Boolean Double Unit Any",
)
_GO = _language(
    *(_C_COMMENT, f"{_QUOTES}|{_BACKTICKS}", *_PLAIN),
    k=f"{_IN_MOST} func var const type struct interface map chan go defer select range package import fallthrough",
    kc="true false nil iota",
    nb=f"{_TYPES} error any int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64 append make len cap new "
    "panic print println",
)
_RUST = _language(
    *(_C_COMMENT, _DOUBLE, *_PLAIN),  # a single quote may begin a lifetime
    k=f"{_IN_MOST} fn let mut const static struct enum impl trait type use mod pub crate self super match loop in as "
    "ref move where unsafe async await dyn func var guard protocol extension init deinit import throws try catch class",
    kc="true false nil None Some Ok Err",
    nb="i8 i16 i32 i64 isize u8 u16 u32 u64 usize f32 f64 bool str char String Vec Option Result Box Self Int Double "
    "Bool Array",
)
_SHELL = _language(
    *(r"(?<!\S)#[^\n]*+", _QUOTES, r"(?P<no>\$(?:\w++|\{[^}\n]*+\}?+)?+)", _NUMBER, _DASHED),
    k="if then else elif fi for in do done while until case esac function return local export FROM RUN CMD COPY ADD "
    "ENV WORKDIR EXPOSE ENTRYPOINT ARG USER VOLUME",
    nb="cd echo exit set unset read source alias eval exec test printf shift trap sudo",
)
_RUBY = _language(
    *(_HASH, _QUOTES, *_PLAIN),
    k="def end class module if elsif else unless while until for in do return yield begin rescue ensure case when then "
    "require include and or not self super function local repeat my sub use foreach library next break elseif",
    kc="true false nil TRUE FALSE NULL NA undef",
    nb="puts print attr_reader attr_accessor lambda proc raise c list paste length",
)
_LUA = _language(
    *(_DASHES, _DOUBLE, *_PLAIN),
    k="and break do else elseif end for function goto if in local not or repeat return then until while module where "
    "import data type class instance let case of deriving newtype qualified",
    kc="true false nil True False Nothing Just",
    nb="print pairs ipairs require string table math Int Integer String Bool Maybe IO",
)
_SQL = _language(
    *(f"{_DASHES}|{_BLOCK}", r"'(?:[^']|'')*+'?+", *_PLAIN),
    k="select from where insert into values update set delete create table drop alter add index view join left right "
    "inner outer full on group by order having limit offset union all distinct as and or not in is like between case "
    "when then else end primary key foreign references default unique begin commit rollback with exists",
    kc="null true false",
    nb="int integer text varchar char real float numeric date timestamp boolean count sum avg min max",
    folds=True,
)
_MARKUP = _language(
    r"<!--(?:[^-]|-(?!->))*+(?:-->)?+",
    r"""="[^"]*+"?+|='[^']*+'?+""",
    *(r"(?P<nt></?+[\w:.-]++|/?>)", r"(?P<ni>&\#?+\w++;?+)", _DASHED),
    kc="",
    keys="=",
)
_CSS = _language(
    *(_BLOCK, _QUOTES, r"(?P<m>(?<![\w-])\d[\w.%]*+)", r"(?P<k>@[\w-]++)", r"(?P<nt>[.\#][\w-]++)", _DASHED),
    kc="inherit initial none auto",
    keys=":",
)
_JSON = _language(_SLASHES, _DOUBLE, *_PLAIN, keys=":")
_KEYED = _language(
    *(r"(?<!\S)[\#;][^\n]*+", _QUOTES, r"(?P<nt>^\[[^\]\n]*+\]?+)", _NUMBER, r"(?P<w>[^\W\d][\w.-]*+)"),
    kc="true false null yes no on off",
    keys=":=",
)
_CHANGES = r"(?P<gi>^\+[^\n]*+)|(?P<gd>^-[^\n]*+)|(?P<gu>^@@[^\n]*+)|(?P<gh>^(?:diff|index) [^\n]*+)"
_DIFF = _Language(re.compile(_CHANGES, re.MULTILINE), {})

LANGUAGES: dict[str, _Language] = {
    name: language
    for names, language in (
        ("python py python3 py3 pyi pycon", _PYTHON),
        ("javascript js jsx mjs typescript ts tsx node", _JAVASCRIPT),
        ("c h cpp c++ cc cxx hpp objective-c objc arduino glsl cuda", _C),
        ("java kotlin kt scala csharp cs c# groovy dart php", _JAVA),
        ("go golang", _GO),
        ("rust rs swift zig", _RUST),
        ("bash sh shell zsh console dockerfile docker", _SHELL),
        ("ruby rb r perl pl julia jl elixir make makefile", _RUBY),
        ("lua haskell hs", _LUA),
        ("sql sqlite mysql postgresql postgres", _SQL),
        ("html xml svg xhtml vue", _MARKUP),
        ("css scss less", _CSS),
        ("json json5 jsonc", _JSON),
        ("yaml yml toml ini cfg conf properties", _KEYED),
        ("diff patch", _DIFF),
    )
    for name in names.split()
}


def highlighted(code: str, language: str) -> str:
    """Code as HTML, coloured if the language is known."""
    known = LANGUAGES.get(language.lower())
    if known is None:
        return escape(code)
    parts, end = [], 0
    for match in known.pattern.finditer(code):
        name = _class_of(match, code, known)
        if name is not None:
            parts += [escape(code[end : match.start()]), f'<span class="{name}">{escape(match[0])}</span>']
            end = match.end()
    return "".join(parts) + escape(code[end:])


def _class_of(match: re.Match[str], code: str, language: _Language) -> str | None:
    """The CSS class of a match; None for no colour."""
    kind, after = match.lastgroup, code[match.end() : match.end() + 2]
    if language.keys and kind in ("w", "s") and after.lstrip(" ")[:1] in tuple(language.keys):
        return "na"
    if kind != "w":
        return kind
    word = match[0].lower() if language.folds else match[0]
    return language.classes.get(word) or ("nf" if after.startswith("(") else None)
