"""The backend of static bundles: against transformers, ordinary bundles, OpenVINO and drafting, and its contract."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest

from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.writing import seal
from edgeinfer.core.errors import BackendError, BundleError, CapabilityError, UsageError
from edgeinfer.core.options.decoding import MOST_DRAFTED, drafters_in
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.export.options import ExportConfig, StaticOptions
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Pass, PassCancelledError
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.backends.registry import facts_of, make_backend
from edgeinfer.runtime.backends.static.backend import StaticBackend
from edgeinfer.runtime.planning.candidates import Drafting, configurations
from tests.alone import Alone, restore
from tests.runtime.interrupts import within_runs
from tests.runtime.models import bundle_of, feed, make_graph_backend
from tests.runtime.test_parity import (
    CAPACITY,
    DRAFT,
    OTHER,
    PARENTS,
    TEXT,
    assert_close,
    feed_in,
    feed_tree,
    path,
)
from tests.tables import each_row

if TYPE_CHECKING:
    from tests.runtime.conftest import Family
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import onnxruntime as ort

import edgeinfer
from tests.cli import TIME_LIMIT, edgeinfer_process
from tests.edgeinfer.conftest import TEMPLATE
from tests.speculation import PROMPT, load_eager, plain, same

SHAPES = StaticOptions(context=48, chunk=12, widths=(1, 2, 4))
FAMILIES = [
    *("llama", "llama-tied", "llama-biases", "llama-mha-odd-sizes", "llama-llama3-rope", "mistral", "qwen2-tied"),
    *("qwen2-windows", "qwen3", "qwen3-tied-biases", "phi3-partial-rotary", "phi3-longrope"),
]
Bundles = Callable[..., "Made"]


class Made:
    """A model, a static and an ordinary bundle of it."""

    def __init__(self, family: Family, options: dict[str, Any]) -> None:
        asked: dict[str, Any] = {"keep_small": False, "bits": 4, "calibration": "none"} | options
        self.static = bundle_of(family.name, ExportConfig(static=SHAPES, **asked))
        self.ordinary = bundle_of(family.name, ExportConfig(**asked))
        self.expected = family.expected


@pytest.fixture(scope="module")
def bundles(make_family: Callable[..., Family]) -> Bundles:
    """Makes bundles of a variant; asked again, gives those it made."""

    @cache
    def make(name: str, **options: Any) -> Made:
        return Made(make_family(name), options)

    return make


@pytest.fixture(scope="module")
def llama(bundles: Bundles) -> Made:
    return bundles("llama", bits=32)


@pytest.fixture
def backend(llama: Made) -> Alone[StaticBackend]:
    return Alone(StaticBackend(llama.static, CAPACITY), CAPACITY)


def feed_prompt(backend: Alone[Any], tokens: Sequence[int]) -> Floats:  # (V,)
    """A chain of which the last row is wanted."""
    ids = np.array(tokens, np.int64)
    last = np.array([len(ids) - 1])
    row: Floats = backend.forward(Pass(ids, backend.cache.length + np.arange(len(ids)), last)).logits[0]
    return row.copy()


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_of_cutting_gives_transformers_logits(bundles: Bundles, family: str, exact: bool) -> None:
    made = bundles(family, bits=32)
    expected = made.expected(TEXT)
    backend = Alone(StaticBackend(made.static, CAPACITY, exact=exact), CAPACITY)
    for sizes in ([20], [7, 1, 9, 3], [1] * 20):
        backend.cache.trim(0)
        assert_close(feed_in(backend, TEXT, sizes), expected)
    backend.cache.trim(0)
    assert_close(feed_prompt(backend, TEXT), expected[-1])
    assert_close(feed(backend, OTHER), made.expected(TEXT + OTHER)[len(TEXT) :])
    backend.cache.trim(9)
    context = TEXT[:9]
    logits = feed_tree(backend, DRAFT, PARENTS)
    for node in range(len(DRAFT)):
        assert_close(logits[node], made.expected(context + [DRAFT[i] for i in path(PARENTS, node)])[-1])
    backend.cache.keep(9, path(PARENTS, 8))
    held = context + [DRAFT[i] for i in path(PARENTS, 8)]
    assert_close(feed(backend, OTHER), made.expected(held + OTHER)[len(held) :])


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2-tied", "qwen3", "phi3-partial-rotary"])
@pytest.mark.parametrize("options", [{"bits": 8}, {"bits": 4}, {"bits": 4, "head_bits": 4, "symmetric": True}])
def test_logits_equal_the_ordinary_bundles(bundles: Bundles, family: str, options: dict[str, Any]) -> None:
    """Both round activations to int8, now and then differently."""
    made = bundles(family, **options)
    ordinary = feed(make_graph_backend(made.ordinary, CAPACITY, layout="portable"), TEXT)
    static = feed(Alone(StaticBackend(made.static, CAPACITY), CAPACITY), TEXT)
    rounding = float(np.abs(ordinary - made.expected(TEXT)).mean())
    assert np.abs(static - ordinary).mean() < rounding / 2
    reference = feed(Alone(ReferenceBackend(made.static, CAPACITY), CAPACITY), TEXT)
    assert np.abs(static - reference).max() < 0.2
    assert np.abs(static - ordinary).max() < 0.1


@pytest.mark.parametrize("options", [{"bits": 32}, {"bits": 8}, {"bits": 4}, {"bits": 4, "group_size": 64}])
@pytest.mark.parametrize("family", ["llama", "llama-biases", "llama-mha-odd-sizes", "mistral", "qwen3"])
def test_rows_are_bit_identical_however_a_text_is_cut(bundles: Bundles, family: str, options: dict[str, Any]) -> None:
    backend = Alone(StaticBackend(bundles(family, **options).static, CAPACITY), CAPACITY)
    assert backend.capabilities.exact
    whole, cache = feed(backend, TEXT), backend.cache.snapshot()
    for sizes in ([7, 1, 9, 3], [1] * 20, [3, 5, 12]):
        backend.cache.trim(0)
        assert np.array_equal(feed_in(backend, TEXT, sizes), whole)
    backend.cache.trim(0)
    assert np.array_equal(feed_prompt(backend, TEXT), whole[-1])
    again = backend.cache.snapshot()
    for mine, theirs in zip((*again.keys, *again.values), (*cache.keys, *cache.values), strict=True):
        assert np.array_equal(mine, theirs)
    backend.cache.trim(8)
    tree, positions = np.array([-1, 0, 1, -1, 3]), np.array([8, 9, 10, 8, 9])
    drafted = [*TEXT[8:11], 4, 5]
    branched = backend.forward(Pass(np.array(drafted), positions, np.arange(5), tree=tree)).logits
    assert np.array_equal(branched[:3], whole[8:11])


def test_only_the_rows_asked_for(llama: Made, backend: Alone[StaticBackend]) -> None:
    expected = llama.expected(TEXT)
    assert backend.forward(Pass(np.array(TEXT[:6]), np.arange(6), np.zeros(0, np.int64))).logits.shape == (
        0,
        320,
    )
    rest = backend.forward(Pass(np.array(TEXT[6:]), np.arange(6, 20), np.array([0, 13, 5, 5])))
    assert_close(rest.logits, expected[[6, 19, 11, 11]])
    assert rest.hidden is None and rest.experts is None


def test_a_full_cache(llama: Made) -> None:
    backend = Alone(StaticBackend(llama.static, 21), 21)
    expected = llama.expected([*TEXT, 1])
    assert_close(feed_in(backend, [*TEXT, 1], [20, 1]), expected)
    with pytest.raises(BackendError, match="does not fit"):
        feed(backend, [1])
    backend.cache.trim(18)
    assert_close(feed(backend, [*TEXT[18:], 1]), expected[18:])
    text = (TEXT * 3)[:48]
    backend = Alone(StaticBackend(llama.static, 48), 48)
    assert_close(feed_in(backend, text, [45, 2, 1]), llama.expected(text))


def test_snapshots_come_back(llama: Made, backend: Alone[StaticBackend]) -> None:
    feed(backend, TEXT[:11])
    snapshot = backend.cache.snapshot()
    first, second = backend.cache.snapshot(0, 4), backend.cache.snapshot(4, 11)
    backend.cache.trim(3)
    feed(backend, OTHER * 2)
    restore(backend.cache, snapshot)
    expected = llama.expected(TEXT)[11:]
    assert_close(feed(backend, TEXT[11:]), expected)
    backend.cache.clear()
    assert backend.cache.length == 0
    for piece in (first, second):
        backend.cache.append(piece)
    assert_close(feed(backend, TEXT[11:]), expected)
    other = make_graph_backend(llama.ordinary, CAPACITY)
    restore(other.cache, snapshot)
    assert_close(feed(other, TEXT[11:]), expected)
    with pytest.raises(BackendError, match="do not fit"):
        restore(Alone(StaticBackend(llama.static, 8), 8).cache, snapshot)


def test_what_it_cannot_do_is_refused(backend: Alone[StaticBackend]) -> None:
    extras: list[dict[str, Any]] = [
        {"layer_mask": np.ones(6, np.bool_)},
        {"hidden": np.zeros((2, 64), np.float32)},
        {"planes": 1},
    ]
    for extra in extras:
        with pytest.raises(CapabilityError):
            backend.forward(Pass(np.array([1, 2]), np.arange(2), np.array([1]), **extra))
    with pytest.raises(BackendError, match="outside a cache of 32"):
        backend.forward(Pass(np.array([1]), np.array([32]), np.array([0])))
    assert backend.cache.length == 0


def test_a_cancelled_pass_leaves_the_cache(llama: Made, backend: Alone[StaticBackend]) -> None:
    feed(backend, TEXT[:9])
    with within_runs(backend.cancel), pytest.raises(PassCancelledError):
        feed(backend, OTHER)
    assert backend.cache.length == 9
    assert_close(feed(backend, OTHER), llama.expected(TEXT[:9] + OTHER)[9:])


def test_impossible_requests(llama: Made) -> None:
    with pytest.raises(UsageError, match="have a context of 48"):
        Alone(StaticBackend(llama.static, 49), 49)
    with pytest.raises(BundleError, match="no static graphs"):
        Alone(StaticBackend(llama.ordinary, 8), 8)
    with pytest.raises(BundleError, match="no static graphs"):
        facts_of(llama.ordinary, LoadOptions(backend="onnx-static"))
    with pytest.raises(BundleError, match="only their own backend"):
        facts_of(llama.static, LoadOptions(backend="onnx"))


@each_row(
    ("options", "rows"),
    [
        ({}, [2, 4, 12]),
        ({"exact": False}, [1, 2, 4, 12]),
        ({"speculation": "off"}, [2, 12]),
        ({"speculation": "off", "exact": False}, [1, 12]),
        ({"draft_max": 3, "prefill_chunk": 4}, [2, 4]),
        ({"speculation": "off", "prefill_chunk": 2}, [2]),
    ],
)
def test_only_planned_sessions_are_made(llama: Made, options: dict[str, Any], rows: list[int]) -> None:
    config = LoadOptions(**options)
    facts = facts_of(llama.static, config)
    names = drafters_in(config.speculation)
    drafting = Drafting(names, (config.draft_max or MOST_DRAFTED) if names else 0, False)
    plan = next(configurations(facts, config, (drafting,)))
    backend = make_backend(facts, config, plan)
    assert isinstance(backend, StaticBackend)
    assert [graph.rows for graph in backend.graphs.all] == rows
    assert_close(feed_prompt(Alone(backend, plan.context), TEXT), llama.expected(TEXT)[-1])


Dimension = onnx.TensorShapeProto.Dimension
CHANGES: tuple[Callable[[onnx.GraphProto], None], ...] = (
    lambda graph: graph.input[0].type.tensor_type.shape.dim[1].CopyFrom(Dimension(dim_value=3)),
    lambda graph: graph.output[0].MergeFrom(onnx.ValueInfoProto(name="other")),
    lambda graph: graph.input[1].type.tensor_type.MergeFrom(onnx.TypeProto.Tensor(elem_type=onnx.TensorProto.FLOAT16)),
    lambda graph: graph.node[3].MergeFrom(onnx.NodeProto(op_type="NoSuchOperator")),
    lambda graph: graph.input.append(onnx.helper.make_tensor_value_info("more", onnx.TensorProto.FLOAT, [1])),
    lambda graph: graph.input[0].type.tensor_type.shape.dim[1].CopyFrom(Dimension(dim_param="S")),
)


@each_row("forge", [*CHANGES, b"", b"no graph", b"\xff" * 64, b"\x3a\xff\xff\xff\x7f"])
def test_graphs_other_than_described_are_refused(
    llama: Made, tmp_path: Path, forge: Callable[[onnx.GraphProto], None] | bytes
) -> None:
    forged = shutil.copytree(llama.static.path, tmp_path / "forged")
    if isinstance(forge, bytes):
        (forged / "model.rows-2.onnx").write_bytes(forge)
        with pytest.raises(BundleError, match=r"bytes|sha256"):
            Alone(StaticBackend(open_bundle(forged), CAPACITY), CAPACITY)
    else:
        model = onnx.load(forged / "model.rows-2.onnx", load_external_data=False)
        forge(model.graph)
        (forged / "model.rows-2.onnx").write_bytes(model.SerializeToString())
    seal(forged, llama.static.manifest)
    with pytest.raises(BundleError, match=r"declares other inputs or outputs|cannot be loaded"):
        Alone(StaticBackend(open_bundle(forged), CAPACITY), CAPACITY)


def test_padding_is_seen_by_no_token(llama: Made, backend: Alone[StaticBackend]) -> None:
    """Whatever lies in rows of the cache that are not in use."""
    feed(backend, TEXT[:5])
    for arrays in (backend.cache.keys, backend.cache.values):
        for array in arrays:
            array[:, :, 5:] = 1e3
    assert_close(feed(backend, OTHER[:3]), llama.expected(TEXT[:5] + OTHER[:3])[5:])


ROOT = Path(__file__).resolve().parents[2]
_VARIABLE = "EDGEINFER_TEST_OPENVINO_PYTHON"
# Options of the export, and by how much logits may differ: at 32 bits only sums are ordered otherwise, below OpenVINO
# multiplies floats where onnxruntime's own operators round activations to int8.
CASES: dict[str, tuple[str, dict[str, Any], float]] = {
    "llama, 32 bits": ("llama", {"bits": 32}, 1e-4),
    "llama, 8 bits": ("llama", {"bits": 8}, 0.2),
    "llama, 4 bits": ("llama", {"bits": 4}, 0.2),
    "llama, 4 bits, symmetric": ("llama", {"bits": 4, "head_bits": 4, "symmetric": True}, 0.2),
    "mistral, 4 bits": ("mistral", {"bits": 4}, 0.2),
    "qwen2-tied, 8 bits": ("qwen2-tied", {"bits": 8}, 0.2),
    "qwen3, 4 bits": ("qwen3", {"bits": 4}, 0.2),
    "phi3-partial-rotary, 8 bits": ("phi3-partial-rotary", {"bits": 8}, 0.2),
}


def interpreter() -> str:
    """The interpreter that has the provider."""
    given = os.environ.get(_VARIABLE, "")
    if given:
        return given
    if "OpenVINOExecutionProvider" in ort.get_available_providers():
        return sys.executable
    pytest.skip(f"onnxruntime-openvino is not installed here, and {_VARIABLE} names no Python that has it")


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """Results of the other interpreter, by case."""
    python, shapes = interpreter(), StaticOptions(context=64, chunk=16)
    configs = [ExportConfig(keep_small=False, static=shapes, **options) for _, options, _ in CASES.values()]
    variants = [variant for variant, _, _ in CASES.values()]
    folders = [bundle_of(variant, config).path for variant, config in zip(variants, configs, strict=True)]
    # Logging of the provider's own goes to stderr, and warnings of other versions are theirs.
    done = subprocess.run(
        [python, str(ROOT / "tests" / "openvino_static.py"), *map(str, folders)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
        timeout=TIME_LIMIT,
    )
    assert done.returncode == 0, done.stderr.decode("utf-8", "replace")
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.openvino
@each_row("case", CASES)
def test_openvino_gives_what_the_cpu_provider_gives(results: dict[str, dict[str, Any]], case: str) -> None:
    """Whole graphs run there, logits and tokens are the same up to ties, rows however a text is cut."""
    found, tolerance = results[case], CASES[case][2]
    assert found["graphs"] == ["model.rows-8.onnx", "model.prompt-16.onnx"] and all(found["whole"])
    assert found["finite"] and found["difference"] < tolerance
    assert found["parted"] is None or found["gap"] < 2 * found["difference"] + 1e-4
    assert found["exact"]


WIDER = StaticOptions(context=256, chunk=16)
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 11}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "penalties": SAMPLED | {"repetition_penalty": 1.2, "presence_penalty": 0.2},
}
WHO = ("auto", "copy", "ngram", "recycle", "forced", "model", "copy,ngram,recycle,model")
# An ordinary bundle of a checkpoint, a static one, and a shallow static one.
EXPORTS: dict[str, StaticOptions | None] = {
    "ordinary": None,
    "static": WIDER,
    "shallow": StaticOptions(context=256, chunk=16, widths=(2, 4), layers=(0, 1)),
}


@pytest.fixture(scope="module")
def exported() -> dict[str, Path]:
    settings: dict[str, Any] = {"max_position_embeddings": 512, "chat_template": TEMPLATE}
    configs = {name: ExportConfig(bits=4, keep_small=False, static=static) for name, static in EXPORTS.items()}
    return {name: bundle_of("qwen3", config, **settings).path for name, config in configs.items()}


@pytest.fixture(scope="module")
def model(exported: dict[str, Path]) -> Iterator[edgeinfer.Model]:
    """The static bundle, with the shallow one to draft for it."""
    with load_eager(exported["static"], draft_model=exported["shallow"], prefix_cache="8MB") as made:
        yield made


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("who", WHO)
def test_text_equals_plain_decoding(model: edgeinfer.Model, who: str, way: str) -> None:
    for width in (1, 3):
        found = same(model, who, max_tokens=60, ignore_eos=True, draft_width=width, **WAYS[way])
        assert found.exact and found.lossless
        if way == "greedy" and who not in ("forced", "auto"):
            assert found.accepted > 0


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("static", "ordinary"), id="target"),
        pytest.param(("ordinary", "shallow"), id="drafter", marks=pytest.mark.slow),
    ],
)
def test_beside_ordinary_bundles(exported: dict[str, Path], names: tuple[str, str]) -> None:
    target, drafter = names
    with load_eager(exported[target], draft_model=exported[drafter], context=128) as mixed:
        for options in ({}, SAMPLED):
            assert same(mixed, "model", max_tokens=40, ignore_eos=True, **options).accepted > 0


def test_without_exactness_speculation_still_works(exported: dict[str, Path]) -> None:
    with load_eager(exported["static"], exact=False) as loose:
        result = loose.generate(PROMPT, max_tokens=40, ignore_eos=True, speculation="copy,ngram,recycle")
        assert result.usage.completion_tokens == 40


@each_row("who", ["exit", "bits"])
def test_drafters_that_need_other_graphs(model: edgeinfer.Model, who: str) -> None:
    with pytest.raises(CapabilityError, match="onnx-static backend cannot"):
        model.generate(PROMPT, speculation=who)


def test_conversations_take_turns_and_come_back(model: edgeinfer.Model, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
    chat, other = model.chat(system="Be brief."), model.chat(system="Say much.")
    chat.send("Tell me about the dog", **options)
    other.send("And the cat?", **options)
    chat.save(tmp_path / "talk.session")
    reply = chat.send("And now?", **options)
    assert reply.timings.cached_prompt_tokens > 10
    model.score([5, 6])  # empties the cache
    again = model.load_chat(tmp_path / "talk.session").send("And now?", **options)
    assert again.token_ids == reply.token_ids and again.timings.cached_prompt_tokens > 10


@pytest.mark.parametrize("overflow", ["window", pytest.param("cluster", marks=pytest.mark.slow)])
def test_a_conversation_may_outgrow_its_context(exported: dict[str, Path], overflow: str) -> None:
    with load_eager(exported["static"], context=64, overflow=overflow) as small:
        result = small.generate(PROMPT, max_tokens=120, ignore_eos=True)
        assert result.usage.completion_tokens == 120


def test_the_context_is_the_exported_one(exported: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="the model allows 256"):
        edgeinfer.load(exported["static"], context=257)
    with pytest.raises(UsageError, match="cannot use a KV cache of type int8"):
        edgeinfer.load(exported["static"], kv="int8")
    with load_eager(exported["static"]) as loaded:
        assert loaded.plan.context == 256
        assert loaded.info.backend == "onnx-static"
        assert plain(loaded, max_tokens=4).usage.completion_tokens > 0


@pytest.fixture(scope="module")
def large() -> Path:
    """A bundle whose weights, in all sessions, are most of the process."""
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "vocab_size": 8192}
    return bundle_of("llama", ExportConfig(bits=8, static=StaticOptions(chunk=16)), **sizes).path


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--speculation", "off"], [], ["--no-exact"]], ids=["plain", "drafting", "loose"])
def test_plans_are_kept(large: Path, options: list[str]) -> None:
    done = edgeinfer_process("run", "-m", large, "-p", PROMPT, "-n", "24", "--json", *options)
    assert done.returncode == 0, done.stderr
    memory = json.loads(done.stdout)["memory"]
    assert memory["peak_rss_bytes"] <= memory["planned_bytes"], memory
    if "off" in options:  # whoever drafts may never have need of the widest graphs
        assert memory["planned_bytes"] <= 1.3 * memory["peak_rss_bytes"], memory
