"""A jinja2 environment in which a hostile template fails soon instead of eating time or memory; knows nothing of chats.

jinja2's sandbox keeps templates from Python's internals but lets them loop, multiply and recurse at will. Here each
render spends from an allowance of work: every loop iteration, call, text and list costs, and sizes are charged before
they are built where an operation can multiply them. Not bounded: comparing lists that contain themselves many times.
"""

from __future__ import annotations

import functools
import html
import json
import re
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent, do_replace, sync_do_join
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_eval_context
from jinja2.visitor import NodeTransformer

__all__ = ["GuardedEnvironment"]

# A render of a full 128k-token conversation spends under 20 million: some copies of half a megabyte of text.
ALLOWANCE = 100_000_000  # units of work; one is about one character built
STEP_COST = 200  # of a loop iteration or call, so that half a million of them, about two seconds, exhaust the allowance
DEADLINE_SECONDS = 5.0
MAX_ARGUMENT = 100_000  # of an integer given to a built-in method, such as a width; the sandbox's own range() limit
MAX_INTEGER_BITS = 4096
MAX_FIELD_WIDTH = 9_999
_WIDE_PERCENT = re.compile(r"%(?:\([^)]*\))?[-#0 +.\d]*(?:\d{5}|\*)")  # wider than that, or as wide as an argument says
_WIDE_BRACES = re.compile(r"\{[^{}]*(?:\d{5}|\{)")
_UNSAFE_FILTERS = ("batch", "center", "format", "pprint", "slice", "urlize", "wordwrap", "xmlattr")
_TEXT_FILTERS = (
    "capitalize",
    "lower",
    "string",
    "striptags",
    "title",
    "trim",
    "truncate",
    "upper",
    "urlencode",
    "wordcount",
)
_UNSAFE_METHODS = ("encode", "expandtabs", "to_bytes", "translate")


class GuardedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and renders templates with the helpers that chat templates expect, inside `allowance()` blocks only."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        self._local = threading.local()
        # Folding constants would run unguarded operations while compiling.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationTag],
            optimized=False,
            finalize=self._finalize,
        )
        for name in _UNSAFE_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters |= {name: self._weighing(self.filters[name]) for name in _TEXT_FILTERS}
        # jinja2's markup strings have methods of their own, out of reach of the guards on str.
        self.filters |= dict.fromkeys(("e", "escape", "forceescape"), self._escape) | {"safe": self._text}
        self.filters["sum"] = self._summing(self.filters["sum"])
        self.filters |= {"tojson": self._tojson, "replace": self._replace, "join": self._join, "indent": self._indent}
        self.binop_table |= {"+": self._add, "*": self._multiply, "**": self._power, "%": self._modulo}

    @contextmanager
    def allowance(self) -> Iterator[None]:
        """A fresh allowance for this thread."""
        self._local.left = ALLOWANCE
        self._local.deadline = time.monotonic() + DEADLINE_SECONDS
        yield

    def spend(self, units: int) -> None:
        """Takes from the allowance.

        Raises:
            TemplateRuntimeError: it is used up, or the deadline has passed.
        """
        self._local.left -= units
        if self._local.left < 0 or time.monotonic() > self._local.deadline:
            raise TemplateRuntimeError("the template does too much work")

    def spend_on(self, value: object) -> None:
        """Takes what turning a value into text would build."""
        stack: list[object] = [value]
        while stack:
            item = stack.pop()
            if isinstance(item, str):
                self.spend(len(item) + 1)
            elif isinstance(item, Mapping):
                self.spend(len(item) + 1)
                stack += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple | set | frozenset):
                self.spend(len(item) + 1)
                stack += item
            else:
                self.spend(1)

    # Called by compiled templates

    def tick(self) -> bool:
        """Marks a loop iteration; the call itself is what costs."""
        return True

    def measured(self, value: object) -> object:
        """Marks a value that was built without a call; `call` charges what it returns."""
        return value

    def joined(self, *parts: object) -> str:
        """The operator ``~``."""
        self.spend_on(parts)
        return "".join(map(str, parts))

    def concat(self, pieces: Iterable[str]) -> str:
        """Joins the output of a macro or block; jinja2's compiled code calls it by this name."""
        texts = list(pieces)
        self.spend(sum(map(len, texts)))
        return "".join(texts)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Calls anything on behalf of a template."""
        __self.spend(STEP_COST)
        if isinstance(__obj, types.BuiltinMethodType):
            __self._check_builtin(__obj, args, kwargs)
            if __obj.__name__ == "join" and args:
                args = (list(args[0]), *args[1:])
                __self.spend_on(args)
                __self.spend(len(str(__obj.__self__)) * len(args[0]))
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str | list | tuple | dict):
            __self.spend(len(result))
        return result

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Refuses at once; jinja2 would give a value that prints as nothing."""
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__} is unsafe")

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Also refuses methods whose results cannot be bounded."""
        unbounded = isinstance(obj, str | int) and attr in _UNSAFE_METHODS
        return not unbounded and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Bounds ``str.format`` as well as keeping it from attributes."""
        inner = super().wrap_str_format(value)
        if inner is None:
            return None

        def formatted(*args: Any, **kwargs: Any) -> str:
            template = value.__self__.replace("{{", "").replace("}}", "")
            self._check_format(_WIDE_BRACES.search(template), template.count("{"), (args, kwargs))
            return inner(*args, **kwargs)

        return formatted

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Guards().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def _finalize(self, value: object) -> object:
        """Charges for what an output expression prints."""
        self.spend_on(value)
        return value

    def _check_builtin(self, method: types.BuiltinMethodType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, int) and abs(value) > MAX_ARGUMENT:
                raise SecurityError(f"{value} is too large an argument for {method.__name__}()")
        if method.__name__ == "replace" and len(args) >= 2:
            self._charge_replace(method.__self__, args[0], args[1])

    def _charge_replace(self, text: Any, old: Any, new: Any) -> None:
        # Without this, replacing each character of one long text by another multiplies their lengths.
        self.spend((len(text) // max(len(old), 1) + 1) * len(new) + len(text))

    def _check_format(self, wide: re.Match[str] | None, fields: int, arguments: object) -> None:
        if wide:
            raise SecurityError("a format string asks for too wide a field")
        before = self._local.left
        self.spend_on(arguments)
        self.spend(fields * (before - self._local.left + MAX_FIELD_WIDTH))

    # Operators and filters

    def _add(self, left: Any, right: Any) -> Any:
        if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            self.spend(len(left) + len(right))
        return left + right

    def _multiply(self, left: Any, right: Any) -> Any:
        for sequence, factor in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and isinstance(factor, int):
                self.spend(len(sequence) * max(factor, 0))
        if isinstance(left, int) and isinstance(right, int):
            self._check_bits(left.bit_length() + right.bit_length())
        return left * right

    def _power(self, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            self._check_bits(left.bit_length() * max(right, 0))
        return left**right

    def _modulo(self, left: Any, right: Any) -> Any:
        if isinstance(left, str):
            self._check_format(_WIDE_PERCENT.search(left), left.count("%"), right)
        return left % right

    def _check_bits(self, bits: int) -> None:
        if bits > MAX_INTEGER_BITS:
            raise SecurityError("a number grows too large")

    def _weighing(self, text_filter: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that makes text of its input, charged for it where that is more than text already."""

        @functools.wraps(text_filter)
        def weighed(*args: Any, **kwargs: Any) -> Any:
            for value in args:
                if isinstance(value, list | tuple | Mapping):
                    self.spend_on(value)
            return text_filter(*args, **kwargs)

        return weighed

    def _summing(self, sum_filter: Callable[..., Any]) -> Callable[..., Any]:
        """The filter ``sum`` for numbers alone: summing lists copies them over and over."""

        @functools.wraps(sum_filter)
        def summed(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(value, list | tuple) for value in (*args[2:], *kwargs.values())):
                raise SecurityError("sum() is for numbers here")
            return sum_filter(*args, **kwargs)

        return summed

    def _text(self, value: object) -> str:
        self.spend_on(value)
        return str(value)

    def _escape(self, value: object) -> str:
        return html.escape(self._text(value))

    def _tojson(
        self,
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Plain JSON, as transformers gives templates; jinja2's own filter escapes HTML."""
        if (indent or 0) > 16 or sum(map(len, separators or ())) > 16:
            raise SecurityError("tojson is asked for too much white space")
        self.spend_on(value)
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    @pass_eval_context
    def _replace(self, context: EvalContext, s: str, old: str, new: str, count: int | None = None) -> str:
        self._charge_replace(str(s), str(old), str(new))
        return do_replace(context, s, old, new, count)

    @pass_eval_context
    def _join(self, context: EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> str:
        items = list(value)
        self.spend_on(items)
        self.spend(len(str(d)) * len(items))
        return sync_do_join(context, items, d, attribute)

    def _indent(self, s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        size = width if isinstance(width, int) else len(width)
        self.spend(len(str(s)) + size * (str(s).count("\n") + 1))
        return do_indent(s, width, first, blank)


class _GenerationTag(Extension):
    """``{% generation %}``, which marks what a model wrote for training; rendering passes it through."""

    tags = {"generation"}  # noqa: RUF012 - the type jinja2 declares

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Guards(NodeTransformer):
    """Puts calls to the environment's guards where compiled templates would loop or build text unseen."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        tick = _guard("tick", [], node)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        if node.test is not None:  # a filtered loop may spin without ever entering its body
            node.test = nodes.And(tick, node.test, lineno=node.lineno)
        return node

    def visit_EvalContextModifier(self, node: nodes.EvalContextModifier) -> NoReturn:  # noqa: N802
        raise TemplateSyntaxError("autoescape has no place in a chat template", node.lineno)

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier) -> NoReturn:  # noqa: N802
        self.visit_EvalContextModifier(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _guard("joined", node.nodes, node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        # Without a node it filters a block's text and is no expression; that text was charged when it was joined.
        innermost: nodes.Node | None = node
        while isinstance(innermost, nodes.Filter):
            innermost = innermost.node
        return node if innermost is None else _guard("measured", [node], node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _guard("measured", [node], node) if isinstance(node.arg, nodes.Slice) else node


def _guard(name: str, arguments: list[nodes.Expr], origin: nodes.Node) -> nodes.Call:
    attribute = nodes.EnvironmentAttribute(name, lineno=origin.lineno)
    return nodes.Call(attribute, arguments, [], None, None, lineno=origin.lineno)
