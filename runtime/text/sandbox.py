"""A jinja2 environment in which templates use listed operations only, each paid for.

jinja2's sandbox keeps templates from Python's internals but lets them loop, multiply and recurse at will. Here what is
not on a list is refused by name, and what is on it is charged to an allowance before it runs, by the sizes of its
operands, so that no single operation takes long and all that a render builds is bounded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from edgeinfer.runtime.text.allowance import (
    ELEMENT_COST,
    POINTER_COST,
    STEP_COST,
    Allowance,
    RefusedError,
    refuse_attribute,
)
from edgeinfer.runtime.text.template_filters import Filters, template_tests
from edgeinfer.runtime.text.template_values import Values

MAX_RANGE = 100_000  # as jinja2's sandbox has it
_PIECE_COST = 32  # of a piece of output, besides its text
_LOOP_ATTRIBUTES = frozenset(
    ("depth", "depth0", "first", "index", "index0", "last", "length", "nextitem", "previtem", "revindex", "revindex0")
)
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}
# fmt: off
_NODES = frozenset((
    nodes.Add, nodes.And, nodes.Assign, nodes.AssignBlock, nodes.Break, nodes.Call, nodes.CallBlock, nodes.Compare,
    nodes.Concat, nodes.CondExpr, nodes.Const, nodes.Continue, nodes.Dict, nodes.Div, nodes.Filter,
    nodes.FilterBlock, nodes.FloorDiv, nodes.For, nodes.Getattr, nodes.Getitem, nodes.If, nodes.Keyword,
    nodes.List, nodes.Macro, nodes.Mod, nodes.Mul, nodes.NSRef, nodes.Name, nodes.Neg, nodes.Not, nodes.Operand,
    nodes.Or, nodes.Output, nodes.Pair, nodes.Pos, nodes.Pow, nodes.Scope, nodes.Slice, nodes.Sub, nodes.Template,
    nodes.TemplateData, nodes.Test, nodes.Tuple, nodes.With,
))
# fmt: on


class TemplateFunction:
    """Something that a template may call, besides its own macros."""

    __slots__ = ("_arguments", "_function")

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._function, self._arguments = function, arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*self._arguments, *args, **kwargs)


class GuardedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and renders templates with the helpers that chat templates expect, and nothing else.

    Attributes:
        allowance: what the render of this thread spends from; whoever renders begins it.
    """

    intercepted_binops = frozenset(_OPERATORS)

    def __init__(self) -> None:
        # Folding constants would run operations while compiling.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationTag],
            optimized=False,
            finalize=self._finalize,
        )
        self.allowance = Allowance()
        self.values = values = Values(self.allowance)
        self.tests.clear()
        self.tests.update(template_tests(self.allowance, values))
        self.filters.clear()
        self.filters.update(Filters(self.allowance, values, self.getitem, self.undefined, self.tests).table)
        self.globals.clear()
        self.globals["range"] = TemplateFunction(self._range)
        self.globals["namespace"] = TemplateFunction(Namespace)
        self.globals["dict"] = TemplateFunction(self._dict)

    # Called by compiled templates

    def tick(self) -> bool:
        """Charges for a loop's iteration."""
        self.allowance.spend(STEP_COST)
        return True

    def concat(self, pieces: Iterable[str]) -> str:
        """Joins the output of a macro or block; jinja2's compiled code calls it by this name."""
        return self.values.join("", list(pieces))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator of arithmetic."""
        return self.values.operate(operator, _OPERATORS[operator], left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Calls anything on behalf of a template."""
        if isinstance(__obj, MethodType):  # a guard that _Guards put there: templates get no other methods
            return __obj(*args)
        __self.allowance.spend(STEP_COST + POINTER_COST * (len(args) + len(kwargs)))
        if isinstance(__obj, TemplateFunction):
            kwargs.pop("_block_vars", None)  # jinja2's own, for callables that ask for its context
            kwargs.pop("_loop_vars", None)
            return __obj(*args, **kwargs)
        if isinstance(__obj, Macro | LoopContext):
            return __context.call(__obj, *args, **kwargs)
        if isinstance(__obj, Undefined):
            __obj()  # says what is undefined
        raise RefusedError(f"a {type(__obj).__name__} is not among what chat templates may call")

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`obj.attribute`, by preference a method."""
        if isinstance(obj, Namespace | LoopContext):
            return self._part(obj, attribute)
        method = self._method(obj, attribute)
        return self._element(obj, attribute) if method is None else method

    def getitem(self, obj: Any, argument: Any) -> Any:
        """`obj[argument]`, by preference an element."""
        if isinstance(obj, Namespace | LoopContext) and isinstance(argument, str):
            return self._part(obj, argument)
        found = self._element(obj, argument)
        if isinstance(found, Undefined) and isinstance(argument, str):
            method = self._method(obj, argument)
            return found if method is None else method
        return found

    def _part(self, obj: Any, name: str) -> Any:
        if isinstance(obj, LoopContext):
            if name == "cycle":
                return TemplateFunction(obj.cycle)
            if name not in _LOOP_ATTRIBUTES:
                refuse_attribute("loop", name)
        elif name.startswith("_"):
            refuse_attribute("namespace", name)
        try:
            return getattr(obj, name)
        except AttributeError:
            return self.undefined(obj=obj, name=name)

    def _method(self, obj: Any, name: str) -> TemplateFunction | None:
        """A method on the list; None where there is none of that name at all."""
        methods: dict[str, Callable[..., Any]] = {}
        if isinstance(obj, str):
            methods = self.values.text_methods
        elif isinstance(obj, Mapping):
            methods = self.values.mapping_methods
        if name in methods:
            return TemplateFunction(methods[name], obj)
        private = name.startswith("_") and not isinstance(obj, Mapping)
        if (private or hasattr(type(obj), name)) and not isinstance(obj, Undefined):
            refuse_attribute(type(obj).__name__, name)
        return None

    def _element(self, obj: Any, key: Any) -> Any:
        if isinstance(obj, Undefined):
            return obj[key]  # says what is undefined
        if isinstance(obj, str | Mapping | list | tuple | range):
            if not (key is None or isinstance(key, str | int | float | Undefined)):
                raise RefusedError(f"a {type(key).__name__} is not a key")  # hashing it may take for ever
            container: Any = obj
            try:
                return container[key]
            except (TypeError, LookupError):
                pass
        return self.undefined(obj=obj, name=key)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all(nodes.Node):
            _check(node)
        guarded: nodes.Template = _Guards().visit(tree)
        guarded.set_environment(self)
        return guarded

    @pass_context  # which also keeps jinja2 from running it while compiling
    def _finalize(self, context: Context, value: object) -> str:
        """Charges for what an output expression prints."""
        self.allowance.spend(_PIECE_COST)
        return self.allowance.text(value)

    # Globals

    def _range(self, *bounds: Any) -> range:
        for bound in bounds:
            self.allowance.number(bound)
        if len(numbers := range(*bounds)) > MAX_RANGE:
            raise RefusedError(f"range() takes at most {MAX_RANGE} numbers")
        return numbers

    def _dict(self, mapping: Any = None, **entries: Any) -> dict[Any, Any]:
        if mapping is not None and not isinstance(mapping, Mapping):
            raise RefusedError("dict() takes a mapping and names")
        self.allowance.spend(2 * ELEMENT_COST * (len(mapping or ()) + len(entries)))
        return {**(mapping or {}), **entries}


def _check(node: nodes.Node) -> None:
    """Refuses what has no place in a chat template."""
    if type(node) not in _NODES:
        raise TemplateSyntaxError(f"{type(node).__name__} has no place in a chat template", node.lineno)
    if getattr(node, "dyn_args", None) is not None or getattr(node, "dyn_kwargs", None) is not None:
        raise TemplateSyntaxError("arguments with * or ** have no place in a chat template", node.lineno)


class _GenerationTag(Extension):
    """``{% generation %}``, which marks what a model wrote for training; rendering passes it through."""

    tags = {"generation"}  # noqa: RUF012 - the type jinja2 declares

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Guards(NodeTransformer):
    """Puts calls to the guards where compiled templates would loop or use values unseen."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        tick = _guard("tick", [], node)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        if node.test is not None:  # a filtered loop may spin without ever entering its body
            node.test = nodes.And(tick, node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _guard("values.joined", node.nodes, node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        arguments = [node.expr]
        for operand in node.ops:
            arguments += [nodes.Const(operand.op, lineno=node.lineno), operand.expr]
        return _guard("values.compare", arguments, node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        return _guard("values.slice", [node.node, *(bound or nodes.Const(None) for bound in bounds)], node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _guard("values.mapping", [part for pair in node.items for part in (pair.key, pair.value)], node)

    def visit_List(self, node: nodes.List) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _guard("values.literal", [node], node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _guard("values.literal", [node], node) if node.ctx == "load" else node


def _guard(name: str, arguments: list[nodes.Expr], origin: nodes.Node) -> nodes.Call:
    attribute = nodes.EnvironmentAttribute(name, lineno=origin.lineno)
    return nodes.Call(attribute, arguments, [], None, None, lineno=origin.lineno)
