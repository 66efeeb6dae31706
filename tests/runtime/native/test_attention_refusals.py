"""edgeinfer.Attention refuses what is malformed, at load or before it writes anything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeinfer.runtime.native.library import NativeKernel
from edgeinfer.runtime.paging.layout import PAGE
from tests.runtime.native.attention_oracle import Floats, Weights
from tests.runtime.native.attention_runs import NAMES, PLAIN, Runner, attributes, small
from tests.runtime.native.graphs import make_model, open_session, run


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
