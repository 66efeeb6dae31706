"""edgeinfer.Attention gives what transformers does: norms, rotations, windows, soft caps and sinks of its layers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from edgeinfer.runtime.native.binding import Binding
from edgeinfer.runtime.native.library import NativeKernel
from edgeinfer.runtime.paging.codecs import ROW_CODECS
from edgeinfer.runtime.paging.layout import PAGE
from tests.runtime.native.attention_oracle import Floats, Shape, Weights, make_layout
from tests.runtime.native.attention_runs import NAMES, PLAIN, Node, Runner, Store, attributes, small
from tests.runtime.native.graphs import make_model, open_session, run

ROWS, HIDDEN = 90, 96


@dataclass(frozen=True)
class Family:
    """A layer of transformers, and the operator's inputs for it."""

    name: str  # of the module; the class is that with Attention behind it
    shape: Shape
    config: dict[str, Any] = field(default_factory=dict)
    class_name: str = ""


HEADS = Shape(heads=6, kv_heads=2, key_size=16, value_size=16, rotary=16)
FAMILIES = (
    Family("llama", HEADS),
    Family("qwen3", replace(HEADS, epsilon=1e-5), {"rms_norm_eps": 1e-5}),
    Family("olmo2", replace(HEADS, epsilon=1e-4), {"rms_norm_eps": 1e-4}),
    Family(
        "phi", replace(HEADS, rotary=8), {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}
    ),
    Family(
        "glm4",
        replace(HEADS, rotary=8, interleaved=True),
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    Family("smollm3", replace(HEADS, rotary=0), {"no_rope_layers": [0]}, "SmolLM3"),
    Family(
        "gemma2",
        replace(HEADS, window=20, softcap=2.0, scale=0.5),
        {"sliding_window": 20, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4},
    ),
    Family("gpt_oss", replace(HEADS, window=33), {"sliding_window": 33}, "GptOss"),
)


def make_layer(family: Family) -> torch.nn.Module:
    """One with random weights and nothing behind the heads."""
    module = importlib.import_module(f"transformers.models.{family.name}.modeling_{family.name}")
    title = family.class_name or family.name.capitalize()
    shape = family.shape
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads}
    config = getattr(module, f"{title}Config")(**sizes, head_dim=shape.key_size, num_hidden_layers=1, **family.config)
    config.head_dim, config._attn_implementation = shape.key_size, "eager"
    layer: torch.nn.Module = getattr(module, f"{title}Attention")(config, 0).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    setattr(layer, "dense" if family.name == "phi" else "o_proj", torch.nn.Identity())
    return layer


def layer_gives(layer: torch.nn.Module, shape: Shape, hidden: torch.Tensor, cos: Any, sin: Any) -> torch.Tensor:
    """Transformers' output for rows (1, S, hidden) of a chain."""
    at = torch.arange(ROWS)
    seen = (at[None] <= at[:, None]) & (at[None] > at[:, None] - (shape.window or ROWS))
    mask = torch.where(seen, 0.0, float("-inf"))[None, None]
    halves = 1 if type(layer).__name__ == "GptOssAttention" else 2
    tables = tuple(torch.from_numpy(np.concatenate([table] * halves, axis=1))[None] for table in (cos, sin))
    result: torch.Tensor = layer(hidden, position_embeddings=tables, attention_mask=mask)[0]
    return result.reshape(ROWS, -1)


@pytest.mark.slow
def test_attention_equals_transformers(kernel: NativeKernel) -> None:
    torch.manual_seed(1)
    angles = np.random.default_rng(1).uniform(0, 6, (ROWS, 8))
    for family in FAMILIES:
        layer, shape = make_layer(family), family.shape
        half = shape.rotary // 2
        cos, sin = (function(angles[:, :half]).astype(np.float32) for function in (np.cos, np.sin))
        hidden = torch.randn(1, ROWS, HIDDEN)
        with torch.no_grad():
            wanted = layer_gives(layer, shape, hidden, cos, sin).numpy()
            qkv = torch.cat([getattr(layer, f"{name}_proj")(hidden)[0] for name in "qkv"], dim=1).numpy()
        given = {name: getattr(layer, name, None) for name in ("q_norm", "k_norm", "sinks")}
        arrays = {name: getattr(p, "weight", p).detach().numpy() for name, p in given.items() if p is not None}
        runner = Runner(kernel, shape, Weights(cos, sin, **arrays) if half else Weights(**arrays))
        store = Store.of(make_layout(shape, "float32", "float32"), 1, ROWS)
        got = runner(store, [Node(0, tuple(range(s + 1)), qkv[s], s) for s in range(ROWS)])
        assert np.abs(got - wanted).max() <= 1e-5 * np.abs(wanted).max(), family.name


SHAPE = Shape(heads=6, kv_heads=2, key_size=20, value_size=24, rotary=12)
# Windows that begin within a block and a page, a soft cap, sinks; each with every type.
SHAPES = {
    "plain": SHAPE,
    "window": replace(SHAPE, window=71, softcap=3.0),
    "long-window": replace(SHAPE, window=270, key_size=64, value_size=64, rotary=64, heads=14, interleaved=True),
}
CAPACITY = 640
# Slots behind a chain: the parent of each node, -1 is the chain's last row. The second branch is accepted.
PARENTS = [-1, 0, 1, 0, 3, -1, 5, 4, 2]
BRANCH = [0, 3, 4, 7]
MakeRunner = Callable[[str, Shape, int], Runner]


@pytest.fixture
def make_runner(kernel: NativeKernel, binding: Binding) -> Iterator[MakeRunner]:
    """Sessions on an instruction set; the best is selected again afterwards."""
    rng = np.random.default_rng(1)
    angles = rng.uniform(0, 6, (CAPACITY, 64))

    def make(isa: str, shape: Shape, threads: int) -> Runner:
        binding.select(isa)
        half = shape.rotary // 2
        cos, sin = (function(angles[:, :half]).astype(np.float32) for function in (np.cos, np.sin))
        norm = np.linspace(0.5, 1.5, shape.key_size, dtype=np.float32)
        sinks = np.linspace(-2, 2, shape.heads, dtype=np.float32) if shape.window else None
        return Runner(kernel, shape, Weights(cos, sin, norm, norm[::-1].copy(), sinks), threads)

    yield make
    binding.select(kernel.isa)


def chain(sequence: int, values: Floats, start: int = 0) -> list[Node]:  # (S, width)
    """Rows one behind the other; each path is a prefix."""
    return [Node(sequence, tuple(range(s + 1)), values[s], s) for s in range(start, len(values))]


def tree(sequence: int, length: int, values: Floats) -> list[Node]:  # (len(PARENTS), width)
    """PARENTS behind a chain, each node in the slot of its number."""
    paths = {-1: tuple(range(length))}
    for node, parent in enumerate(PARENTS):
        paths[node] = (*paths[parent], length + node)
    return [Node(sequence, paths[n], values[n], len(paths[n]) - 1) for n in range(len(PARENTS))]


def alone(runner: Runner, store: Store, nodes: Sequence[Node]) -> Floats:
    """Every row in a pass of its own."""
    return np.concatenate([runner(store, [node]) for node in nodes])


def branches(runner: Runner, store: Store, known: Floats, values: Floats) -> Floats:
    """Output of each node of a tree, computed alone behind its path: rows of chains, one at a time."""
    results, length = [], len(known)
    for node in range(len(PARENTS)):
        path, at = [node], PARENTS[node]
        while at >= 0:
            path.insert(0, at)
            at = PARENTS[at]
        results.append(alone(runner, store, chain(0, np.concatenate([known, values[path]]), length))[-1])
    return np.stack(results)


@pytest.mark.every_case
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "window" else pytest.mark.slow) for n in SHAPES])
def test_the_same_bits_in_any_company(make_runner: MakeRunner, binding: Binding, name: str) -> None:
    shape, rng = SHAPES[name], np.random.default_rng(2)
    first, second, behind = 515 if name == "long-window" else 275, 70, 4
    values = [rng.standard_normal((n, shape.width), np.float32) for n in (first + behind, second, len(PARENTS))]
    for kind in ROW_CODECS:
        layout = make_layout(shape, kind, kind)
        single = make_runner("portable", shape, 1)
        store = Store.of(layout, 2, CAPACITY)
        # The last rows of a chain alone, one at a time, with all before them in one pass; and a short chain wholly so.
        single(store, chain(0, values[0][: first - 40]))
        wanted = alone(single, store, chain(0, values[0][:first], first - 40))
        wanted_second = alone(single, store, chain(1, values[1]))
        wanted_tree = branches(single, store.copy(), values[0][:first], values[2])
        accepted = np.concatenate([values[0][:first], values[2][BRANCH], values[0][first:]])
        wanted_behind = alone(single, store, chain(0, accepted, first))[-behind:]
        for isa, threads in [(isa, threads) for isa in binding.isas() for threads in (1, 2)]:
            runner, label = make_runner(isa, shape, threads), f"{kind} {isa} {threads}"
            other = Store.of(layout, 2, CAPACITY, rng)
            # Both chains in passes of any size, rows in any order; the second sequence grows together with the first.
            got: dict[tuple[int, int], Floats] = {}
            rows = [chain(0, values[0][:first]), chain(1, values[1])]
            while any(rows):
                taken = [rng.integers(1, 1 + len(r)) if r else 0 for r in rows]
                nodes = [node for r, n in zip(rows, taken, strict=True) for node in r[:n]]
                rows = [r[n:] for r, n in zip(rows, taken, strict=True)]
                order = rng.permutation(len(nodes))
                for at, y in zip(order, runner(other, [nodes[i] for i in order]), strict=True):
                    got[nodes[at].sequence, nodes[at].path[-1]] = y
            for sequence, start, expected in ((0, first - 40, wanted), (1, 0, wanted_second)):
                found = np.stack([got[sequence, start + i] for i in range(len(expected))])
                np.testing.assert_array_equal(found, expected, err_msg=label)
            # The tree in one pass with a row of the other sequence, which is written again.
            nodes = [*tree(0, first, values[2]), chain(1, values[1])[-1]]
            order = rng.permutation(len(nodes))
            y = runner(other, [nodes[i] for i in order])[np.argsort(order)]
            np.testing.assert_array_equal(y[:-1], wanted_tree, err_msg=label)
            np.testing.assert_array_equal(y[-1], wanted_second[-1], err_msg=label)
            # What follows the side branch that was accepted, its rows left where they are.
            path = nodes[BRANCH[-1]].path
            after = [len(PARENTS) + first + i for i in range(behind)]
            nodes = [Node(0, (*path, *after[: i + 1]), values[0][first + i], len(path) + i) for i in range(behind)]
            y = np.concatenate([runner(other, nodes[:1]), runner(other, nodes[1:])])
            np.testing.assert_array_equal(y, wanted_behind, err_msg=label)


def changed(array: NDArray[Any], *places: tuple[tuple[int, ...], int]) -> NDArray[Any]:
    other = array.copy()
    for place, value in places:
        other[place] = value
    return other


def test_malformed_tables_are_refused_and_nothing_is_written(kernel: NativeKernel) -> None:
    runner, store, inputs = small(kernel)
    rows, extras, pages, layout = (inputs[name] for name in ("rows", "extras", "pages", "layout"))
    assert rows.tolist() == [[0, 1, 0, 0], [0, 2, 0, 0], [0, 1, 0, 1], [1, 1, 1, 0], [0, 1, 1, 2]]
    assert extras.tolist() == [2, 2, 3]
    end = pages.shape[1] * PAGE
    table: list[tuple[str, NDArray[Any], str]] = [
        ("rows", changed(rows, ((3, 0), 2)), "row 3 is of a sequence that has no table"),
        ("rows", changed(rows, ((3, 0), -1)), "row 3 is of a sequence that has no table"),
        ("rows", changed(rows, ((1, 1), -1)), "row 1 has a negative prefix"),
        ("rows", changed(rows, ((1, 1), -(2**31))), "row 1 has a negative prefix"),
        ("rows", changed(rows, ((1, 1), 0)), "row 1 has no slot of its own"),
        ("rows", changed(rows, ((1, 1), end + 1)), "row 1 has a prefix that goes beyond its pages"),
        ("rows", changed(rows, ((1, 1), 2**31 - 1)), "row 1 has a prefix that goes beyond its pages"),
        ("rows", changed(rows, ((4, 3), -2)), "row 4 has a negative number of extras"),
        ("rows", changed(rows, ((4, 3), -1)), "row 4 writes to a slot that another row writes"),
        ("rows", changed(rows, ((4, 3), -1), ((4, 2), end)), "row 4 names a slot that has no page"),
        ("rows", changed(rows, ((4, 3), -1), ((4, 2), -1)), "row 4 names a slot that has no page"),
        ("rows", changed(rows, ((1, 3), -1), ((1, 1), 0)), "row 1 has no slot of its own"),
        ("rows", changed(rows, ((4, 3), 3)), "row 4 has extras outside the list"),
        ("rows", changed(rows, ((4, 3), 2**31 - 1)), "row 4 has extras outside the list"),
        ("rows", changed(rows, ((4, 2), -1)), "row 4 has extras outside the list"),
        ("rows", changed(rows, ((4, 2), 2**31 - 1)), "row 4 has extras outside the list"),
        ("rows", changed(rows, ((4, 1), 3)), "row 4 has extras that do not ascend after its prefix"),
        ("rows", changed(rows, ((0, 1), 2)), "row 1 writes to a slot that another row writes"),
        ("extras", changed(extras, ((2,), 2)), "row 4 has extras that do not ascend"),
        ("extras", changed(extras, ((1,), 5)), "row 4 has extras that do not ascend"),
        ("extras", changed(extras, ((0,), -5)), "row 2 has extras that do not ascend"),
        ("extras", changed(extras, ((2,), end)), "row 4 has an extra that has no page"),
        ("extras", changed(extras, ((2,), 2**31 - 1)), "row 4 has an extra that has no page"),
        ("extras", changed(extras, ((0,), 1)), "row 2 writes to a slot that another row writes"),
        ("pages", changed(pages, ((1, 1), 4)), "page 4 of sequence 1 is outside the pool"),
        ("pages", changed(pages, ((0, 1), -2)), "page -2 of sequence 0 is outside the pool"),
        ("pages", changed(pages, ((0, 0), -1)), "row 0 has a prefix that goes beyond its pages"),
        ("pages", changed(pages, ((1, 0), 0)), "row 0 writes to a page that is held twice"),
        ("pages", changed(pages, ((0, 1), 0)), "row 0 writes to a page that is held twice"),
        ("position_ids", changed(inputs["position_ids"], ((0, 2), 600)), "row 2 has a position outside cos and sin"),
        ("position_ids", changed(inputs["position_ids"], ((0, 2), -1)), "row 2 has a position outside cos and sin"),
        ("layout", layout[:3], "layout does not have the layer"),
        ("layout", changed(layout, ((0,), 4)), "a type that is not known"),
        ("layout", changed(layout, ((1,), -1)), "a type that is not known"),
        ("layout", changed(layout, ((2,), 0)), "page_bytes must be a multiple of 4096"),
        ("layout", changed(layout, ((2,), 4100)), "page_bytes must be a multiple of 4096"),
        ("layout", changed(layout, ((2,), 2**62)), "page_bytes must be a multiple of 4096"),
        ("layout", changed(layout, ((2,), 4096)), "the layer does not fit into a page"),
        ("layout", changed(layout, ((3,), 64)), "the layer does not fit into a page"),
        ("layout", changed(layout, ((3,), -64)), "the layer does not fit into a page"),
        ("layout", changed(layout, ((3,), 2**63 - 64)), "the layer does not fit into a page"),
        ("pool", store.memory[: 3 * store.layout.page_bytes], "page 3 of sequence 1 is outside the pool"),
        ("pool", store.memory[4:], "the pool must begin at a multiple of 64 bytes"),
        ("qkv", inputs["qkv"][:, :4], "rows has 20 elements instead of 16"),
        ("qkv", inputs["qkv"][..., :9], "the last dimension of qkv must be 128"),
        ("cos", inputs["cos"][:, :3], "cos and sin must have rows of 8"),
        ("sin", inputs["sin"][:9], "cos and sin must have rows of 8"),
    ]
    before, good = store.memory.copy(), run(runner.session, **inputs)
    assert np.array_equal(store.memory, before)
    for name, value, message in table:
        other = inputs | {name: value, "qkv": value if name == "qkv" else inputs["qkv"] + 1}
        with pytest.raises(Exception, match=f"Attention: .*{message}"):
            run(runner.session, **other)
        assert np.array_equal(store.memory, before), message
    np.testing.assert_array_equal(run(runner.session, **inputs), good)


def test_attributes_that_do_not_fit_are_refused_at_load(kernel: NativeKernel) -> None:
    _, _, inputs = small(kernel)
    inputs = {name: value for name, value in inputs.items() if name not in ("cos", "sin")}
    table = np.zeros((2, 8), np.float32)
    changes: list[tuple[dict[str, Any], dict[str, Floats], str]] = [
        ({"num_heads": 0}, {}, "num_heads must be between"),
        ({"num_heads": 2**32 + 4}, {}, "num_heads must be between"),
        ({"num_heads": 5}, {}, "num_heads must be a multiple of kv_num_heads"),
        ({"kv_num_heads": 0}, {}, "num_heads must be a multiple of kv_num_heads"),
        ({"key_size": 0}, {}, "key_size and value_size must be"),
        ({"value_size": 2**15}, {}, "key_size and value_size must be"),
        ({"rotary_dim": 3}, {}, "rotary_dim must be even, and at most key_size"),
        ({"rotary_dim": 18}, {}, "rotary_dim must be even, and at most key_size"),
        ({"rotary_dim": 16}, {}, "cos, sin and rotary_dim belong together"),
        ({"rotary_dim": 16}, {"cos": table}, "cos, sin and rotary_dim belong together"),
        ({}, {"cos": table, "sin": table}, "cos, sin and rotary_dim belong together"),
        ({"window": -1}, {}, "window must not be negative"),
        ({"softcap": -1.0}, {}, "softcap must not be negative"),
        ({"softcap": float("nan")}, {}, "softcap must not be negative"),
        ({"interleaved": 2}, {}, "interleaved must be 0 or 1"),
        ({"latent": 1}, {}, "latent attention has one kv head"),
        ({"norm_epsilon": 0.0}, {"q_norm": table[0]}, "a norm needs the attribute norm_epsilon"),
    ]
    for values, known, message in changes:
        model = make_model("Attention", NAMES, inputs, known, **(attributes(PLAIN) | values))
        with pytest.raises(Exception, match=f"Attention: .*{message}"):
            open_session(kernel, model)
    for name in ("num_heads", "kv_num_heads", "key_size", "value_size", "layer"):
        values = {key: value for key, value in attributes(PLAIN).items() if key != name}
        with pytest.raises(Exception, match=f"Attention: the attribute {name} is missing"):
            open_session(kernel, make_model("Attention", NAMES, inputs, {}, **values))


def test_norms_and_sinks_of_the_wrong_size_are_refused(kernel: NativeKernel) -> None:
    _, store, inputs = small(kernel)
    for known, message in (
        ({"q_norm": 17}, "q_norm and k_norm must have 16 elements, or 64 and 32"),
        ({"q_norm": 16, "k_norm": 32}, "q_norm and k_norm must have 16 elements, or 64 and 32"),
        ({"sinks": 3}, "sinks has 3 elements instead of 4"),
    ):
        weights = Weights(inputs["cos"], inputs["sin"], **{n: np.ones(c, np.float32) for n, c in known.items()})
        with pytest.raises(Exception, match=f"Attention: {message}"):
            run(Runner(kernel, replace(PLAIN, rotary=16), weights).session, **inputs | {"pool": store.memory})
