"""The backend over pages: rows have the same bits in trees, with other texts, in sequences, in windows, by planes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.bundle import graph
from edgeinfer.bundle.geometry import PAGED_KV
from edgeinfer.bundle.layouts import NATIVE, PORTABLE, WEIGHTS, Layout
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import BackendError, CapabilityError
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Pass
from edgeinfer.runtime.backends.onnx.paged_backend import PagedBackend
from edgeinfer.runtime.backends.reference import backend as reference
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.paging.layout import pages_of
from tests.alone import Alone
from tests.kernel import require_kernel
from tests.runtime.models import bundle_of, make_graph_backend
from tests.tables import each_row

CAPACITY = 2 * graph.TREE_ROWS + 100
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
QUANTIZED = ExportConfig(4, 32, keep_small=False, layout="native", calibration="none")
# Of the second, windows end far before the text, and further than a tree's rows behind its beginning; the third and the
# mixture have matrices of floats, one row of which differs from several.
MODELS: dict[str, tuple[str, ExportConfig]] = {
    "qwen2": ("qwen2", QUANTIZED),
    "mistral": ("mistral", QUANTIZED),
    "wider": ("qwen2", ExportConfig(4, 128, layout="native", calibration="none")),
    "float32": ("qwen2", ExportConfig(32, layout="native")),
}
NOTHING = np.zeros(0, np.int64)
PAST = 2 * graph.TREE_ROWS + 3
TEXT = np.random.default_rng(5).integers(0, 300, PAST + 6)
# Every token of the text is a second child.
ROWS = np.arange(1, 12, 2)
TREE = np.repeat(ROWS - 2, 2)
TREE_TOKENS = np.stack([(TEXT[PAST:] + 1) % 300, TEXT[PAST:]], axis=1).ravel()
TREE_PLACES = PAST + np.repeat(np.arange(6), 2)


def model(name: str) -> Bundle:
    require_kernel()
    family, config = MODELS[name]
    return bundle_of(family, config, **SIZES, max_position_embeddings=1024)


@pytest.fixture(params=[("qwen2", kv) for kv in PAGED_KV] + [(name, "float32") for name in MODELS if name != "qwen2"])
def backend(request: pytest.FixtureRequest) -> Iterator[Alone[PagedBackend]]:
    name, kv = request.param
    made = Alone(PagedBackend(model(name), CAPACITY, kv=kv), CAPACITY)
    yield made
    made.close()


def feed(backend: Alone[PagedBackend], *cuts: int) -> Floats:  # (S, V)
    """The text in passes that end at these tokens, in place of what is there."""
    backend.cache.trim(0)
    parts = [np.arange(start, stop) for start, stop in zip((0, *cuts), cuts, strict=False)]
    return np.concatenate([backend.forward(Pass(TEXT[p], p, p - p[0])).logits.copy() for p in parts])


def test_a_row_has_the_same_bits_in_any_company(backend: Alone[PagedBackend]) -> None:
    whole = feed(backend, len(TEXT))
    assert np.array_equal(feed(backend, 64, 65, 66, 200, PAST, PAST + 1, len(TEXT)), whole)
    behind = whole[PAST:]
    # The branch of a tree, which then is the text.
    feed(backend, PAST)
    tree = backend.forward(Pass(TREE_TOKENS, TREE_PLACES, ROWS, tree=TREE)).logits
    assert np.array_equal(tree, behind)
    backend.cache.keep(PAST, ROWS.tolist())
    place = np.array([len(TEXT)])
    one = backend.forward(Pass(TEXT[:1], place, np.zeros(1, np.int64))).logits.copy()
    backend.cache.trim(len(TEXT))
    feed(backend, len(TEXT))
    assert np.array_equal(backend.forward(Pass(TEXT[:1], place, np.zeros(1, np.int64))).logits, one)
    # With rows of other sequences, one of which shares the beginning.
    feed(backend, PAST)
    fork, alone = backend.cache.fork(), backend.new_sequence(100)
    both = Pass(TREE_TOKENS, TREE_PLACES, ROWS, tree=TREE)
    start = Pass(TEXT[:70], np.arange(70), np.arange(70))
    rest = Pass(TEXT[PAST:], np.arange(PAST, len(TEXT)), np.arange(6))
    outputs = backend.forward_together([(alone, start), (backend.cache, rest), (fork, both)])
    for found, expected in zip(outputs, (whole[:70], behind, behind), strict=True):
        assert np.array_equal(found.logits, expected)
    assert [cache.length for cache in (alone, backend.cache, fork)] == [70, len(TEXT), PAST + 12]


def test_the_head_alone_gives_the_bits_of_the_pass(backend: Alone[PagedBackend]) -> None:
    feed(backend, PAST)
    size = len(TEXT) - PAST
    rows, places = np.arange(size), np.arange(PAST, len(TEXT))
    whole = backend.forward(Pass(TEXT[PAST:], places, rows)).logits.copy()
    backend.cache.trim(PAST)
    first = backend.forward(Pass(TEXT[PAST:], places, rows[:2]))
    assert first.hidden is not None
    assert np.array_equal(first.logits, whole[:2])
    hidden = first.hidden.copy()
    for some in (rows[2:], rows[:1], rows[1:4]):
        assert np.array_equal(backend.head(hidden[some]), whole[some])
    assert backend.head_apart
    assert backend.cache.length == len(TEXT)


@each_row("kv", PAGED_KV)
def test_numbers_equal_the_plain_backends(kv: str) -> None:
    """A model whose weights are floats, so that only the cache's type rounds."""
    bundle = model("float32")
    paged, plain = Alone(PagedBackend(bundle, 200, kv=kv), 200), Alone(ReferenceBackend(bundle, 200, kv=kv), 200)
    batch = Pass(TEXT[:150], np.arange(150), np.arange(150))
    tree = Pass(TREE_TOKENS, TREE_PLACES - PAST + 150, np.arange(12), tree=TREE)
    for each in (batch, tree):
        found, expected = paged.forward(each), plain.forward(each)
        difference = np.abs(found.logits - expected.logits)
        # Where the two round a number to another level, it moves by one. The kernel rounds queries of int8 as well.
        usual, most = {"float32": (1e-4, 1e-4), "int8": (0.02, 0.25)}.get(kv, (1e-4, 0.05))
        assert np.median(difference) < usual and difference.max() < most
    paged.close()


def test_sequences_of_one_pass_are_checked() -> None:
    backend = Alone(PagedBackend(model("qwen2"), CAPACITY), CAPACITY)
    feed(backend, 10)
    fork, one = backend.cache.fork(), Pass(TEXT[10:11], np.array([10]), NOTHING)
    mask = np.ones(2 * backend.geometry.num_layers, np.bool_)
    hidden = np.zeros((1, backend.geometry.hidden_size), np.float32)
    skipping = Pass(one.tokens, one.positions, NOTHING, layer_mask=mask)
    resuming = Pass(one.tokens, one.positions, NOTHING, hidden=hidden)
    stranger = Alone(PagedBackend(model("qwen2"), 64), 64)
    wrong = {
        "only once": [(backend.cache, one), (backend.cache, one)],
        "another model": [(backend.cache, one), (stranger.cache, one)],
        "same layers": [(backend.cache, one), (fork, skipping)],
        "planes": [(backend.cache, one), (fork, resuming)],
        "does not fit": [(backend.new_sequence(1), Pass(TEXT[:2], np.arange(2), NOTHING))],
    }
    for message, sequences in wrong.items():
        with pytest.raises(BackendError, match=message):
            backend.forward_together(sequences)
    with pytest.raises(BackendError, match="longer than a context"):
        backend.new_sequence(CAPACITY + 1)
    assert (backend.cache.length, fork.length) == (10, 10)
    for each in (backend, stranger):
        each.close()


def test_memory_counts_the_pages_in_use() -> None:
    backend = Alone(PagedBackend(model("qwen2"), CAPACITY), CAPACITY)
    page = backend.pool.layout.page_bytes
    assert backend.nbytes()["kv"] == 0
    feed(backend, 100)
    assert backend.nbytes()["kv"] == 2 * page
    few = backend.nbytes()["buffers"]
    feed(backend, len(TEXT))
    assert backend.nbytes()["kv"] <= pages_of(CAPACITY) * page and backend.nbytes()["buffers"] > few
    backend.cache.clear()
    assert backend.nbytes()["kv"] == 0 and backend.nbytes()["buffers"] < few
    backend.close()


SHORT = np.array([0, 40, 41, 42, 43, 44, 45])


def export(layout: Layout = NATIVE, *, bits: int = 8, symmetric: bool = False) -> Bundle:
    config = ExportConfig(bits=bits, keep_small=False, symmetric=symmetric, layout=layout, calibration="none")
    return bundle_of("qwen2", config, hidden_size=128)


def logits(backend: Alone[Any], planes: int) -> Floats:  # (S, V)
    """Logits of a text, from an empty cache."""
    backend.cache.trim(0)
    step = backend.forward(Pass(SHORT, np.arange(len(SHORT)), np.arange(len(SHORT)), planes=planes))
    return step.logits.copy()


def rms(values: Floats) -> float:
    """Root of the mean square."""
    return float(np.sqrt(np.mean(values * values)))


@each_row("symmetric", [False, True])
def test_one_plane_equals_the_reference(symmetric: bool) -> None:
    require_kernel()
    bundle = export(symmetric=symmetric)
    onnx, reference = make_graph_backend(bundle, 64), Alone(ReferenceBackend(bundle, 64), 64)
    assert onnx.capabilities.high_planes
    assert reference.capabilities.high_planes
    whole, high = (logits(reference, planes) for planes in (2, 1))
    # Activations are rounded to int8, the reference's are not.
    rounding = rms(logits(onnx, 2) - whole)
    assert rounding < 0.05 * rms(whole)
    assert rms(logits(onnx, 1) - high) < 2 * rounding
    assert rms(whole - high) > 4 * rounding
    for backend, planes in ((onnx, 0), (onnx, 3), (reference, 0), (reference, 3)):
        with pytest.raises(BackendError, match=f"cannot read {planes} planes"):
            logits(backend, planes)
    # Nothing of a pass with one plane stays behind.
    np.testing.assert_array_equal(logits(onnx, 2), logits(make_graph_backend(bundle, 64), 2))


def test_backends_without_planes_refuse() -> None:
    portable = make_graph_backend(export(PORTABLE), 64)
    four = Alone(ReferenceBackend(export(PORTABLE, bits=4), 64), 64)
    for backend in (portable, four):
        assert not backend.capabilities.high_planes
        with pytest.raises(CapabilityError, match="cannot read one plane of its weights"):
            logits(backend, 1)
        assert backend.cache.length == 0
        logits(backend, 2)


@each_row("kv", ("int8", "int4"))
def test_large_biases_of_keys_do_not_change_texts(kv: str, tmp_path: Path) -> None:
    require_kernel()
    slow = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    made = bundle_of("qwen2", MODELS["float32"][1], **SIZES, max_position_embeddings=1024, **slow)
    shutil.copytree(made.path, tmp_path / "biased")
    bundle = open_bundle(tmp_path / "biased")
    for layer in range(2):
        blob = bundle.manifest.tensor(f"layers.{layer}.attn.qkv_bias").data
        bias = np.memmap(bundle.path / WEIGHTS, np.float32, "r+", blob.offset, blob.shape)
        keys = bias[128:192].reshape(2, 32)  # of heads, whose pairs from the twelfth on hardly turn
        keys[:, [12, 13, 14, 15, 28, 29, 30, 31]] = np.linspace(-250, 300, 16).reshape(2, 8)
        bias.flush()
    backends: list[Alone[PagedBackend] | Alone[ReferenceBackend]] = [
        Alone(PagedBackend(bundle, 200, kv=kind), 200) for kind in ("float32", kv)
    ]
    backends.append(Alone(ReferenceBackend(bundle, 200, kv=kv), 200))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "key_centres", lambda bundle: {})
        backends.append(Alone(ReferenceBackend(bundle, 200, kv=kv), 200))
    batch = Pass(TEXT[:150], np.arange(150), np.arange(150))
    whole, fewer, plain, with_biases = (each.forward(batch).logits for each in backends)
    lost = np.abs(fewer - whole).mean()
    assert lost < whole.std() * {"int8": 0.05, "int4": 0.3}[kv] and lost < np.abs(with_biases - whole).mean() / 4
    assert np.abs(fewer - plain).mean() < lost
    # Whoever turns or drops keys reads them as they are.
    exact, kept = (each.cache.read(1, 0, 150)[0] for each in backends[:2])
    assert np.abs(kept - exact).max() < 1 < np.abs(exact).max() / 200
    for each in backends:
        each.close()
