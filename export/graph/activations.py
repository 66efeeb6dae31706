"""Activation functions in standard operators, by their names in a decoder's description, and gates and caps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from edgeinfer.export.graph.builder import MICROSOFT, GraphBuilder

# Source: transformers' GptOssExperts and XIELUActivation.
_OAI_LIMIT, _OAI_ALPHA = 7.0, 1.702
_XIELU_BETA, _XIELU_EPS = 0.5, -1e-6


def add_activation(graph: GraphBuilder, name: str, value: str, result: str, constants: str = "") -> str:
    """Adds an activation function; returns `result`.

    Args:
        name: one of edgeinfer.bundle.spec.Activation but swiglu_oai, which needs both factors; or "sigmoid".
        constants: of xielu, alpha_p and alpha_n (2,).
    """
    if name == "xielu":
        return _xielu(graph, value, result, constants)
    return _FUNCTIONS[name](graph, value, result)


def _silu(graph: GraphBuilder, value: str, result: str) -> str:
    # QuickGelu is x * sigmoid(alpha * x): SiLU in one pass over the data.
    return graph.op("QuickGelu", [value], result, domain=MICROSOFT, alpha=1.0)


def _relu2(graph: GraphBuilder, value: str, result: str) -> str:
    positive = graph.op("Relu", [value], f"{result}.positive")
    return graph.op("Mul", [positive, positive], result)


def _xielu(graph: GraphBuilder, value: str, result: str, constants: str) -> str:
    alphas = [f"{result}.alpha_p", f"{result}.alpha_n"]
    graph.ops("Split", [constants], alphas, axis=0, num_outputs=2)
    square = graph.op("Mul", [value, value], f"{result}.square")
    above = graph.op("Mul", [square, alphas[0]], f"{result}.above")
    low = graph.op("Min", [value, graph.scalar("xielu_eps", _XIELU_EPS)], f"{result}.low")
    grown = graph.op("Exp", [low], f"{result}.exp")
    less_one = graph.op("Sub", [grown, graph.scalar("one", 1.0)], f"{result}.expm1")
    rest = graph.op("Sub", [less_one, value], f"{result}.rest")
    below = graph.op("Mul", [rest, alphas[1]], f"{result}.below")
    positive = graph.op("Greater", [value, graph.scalar("zero", 0.0)], f"{result}.positive")
    bent = graph.op("Where", [positive, above, below], f"{result}.bent")
    line = graph.op("Mul", [value, graph.scalar("xielu_beta", _XIELU_BETA)], f"{result}.line")
    return graph.op("Add", [bent, line], result)


_FUNCTIONS: Mapping[str, Callable[[GraphBuilder, str, str], str]] = {
    "silu": _silu,
    "gelu": lambda graph, value, result: graph.op("Gelu", [value], result, approximate="none"),
    "gelu_tanh": lambda graph, value, result: graph.op("Gelu", [value], result, approximate="tanh"),
    "relu2": _relu2,
    "sigmoid": lambda graph, value, result: graph.op("Sigmoid", [value], result),
}


def add_gated_oai(graph: GraphBuilder, gate: str, up: str, result: str) -> str:
    """Adds gpt-oss's clamped SwiGLU of both factors; returns `result`."""
    limit, below = graph.scalar("oai_limit", _OAI_LIMIT), graph.scalar("oai_below", -_OAI_LIMIT)
    capped = graph.op("Min", [gate, limit], f"{result}.gate")
    swish = graph.op("QuickGelu", [capped], f"{result}.swish", domain=MICROSOFT, alpha=_OAI_ALPHA)
    bounded = graph.op("Clip", [up, below, limit], f"{result}.bounded")
    raised = graph.op("Add", [bounded, graph.scalar("one", 1.0)], f"{result}.raised")
    return graph.op("Mul", [swish, raised], result)


def add_softcap(graph: GraphBuilder, value: str, cap: float, result: str) -> str:
    """Adds cap * tanh(value / cap); returns `result`."""
    scaled = graph.op("Div", [value, graph.scalar(f"cap_{cap:g}", cap)], f"{result}.scaled")
    bent = graph.op("Tanh", [scaled], f"{result}.bent")
    return graph.op("Mul", [bent, graph.scalar(f"cap_{cap:g}", cap)], result)
