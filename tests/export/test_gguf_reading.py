"""GGUF files of all families, written from checkpoints and read back: descriptions, tensors and logits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("gguf")

from gguf import GGUFReader, GGUFValueType, GGUFWriter

from edgeinfer.bundle.gguf.metadata import GGML_TYPES, Metadata, Value
from edgeinfer.bundle.gguf.reader import GgufFile, read_gguf
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.parts import RopeSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.errors import EdgeInferError, UnsupportedArchitectureError
from edgeinfer.export.architectures.planned_tensors import PlannedTensors
from edgeinfer.export.gguf.reading import GgufTensors, convert_gguf, convert_model, look, read_model
from edgeinfer.export.gguf.writer import open_gguf_source, write_gguf
from edgeinfer.export.source.checkpoint import Checkpoint
from edgeinfer.export.source.hf_config import read_config
from edgeinfer.export.source.sidecar import read_sidecar
from edgeinfer.nn.arithmetic import inverse_frequencies
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from tests.alone import Alone
from tests.export.gguf_cases import EXPERTS, GEMMA, GGUF_CASES, GRANITE, PLAIN, ROPES, ROUTED_SWA, layers
from tests.export.passes import TOKENS, expected_logits
from tests.factories import make_checkpoint
from tests.gguf_corpus import CASES
from tests.runtime.models import feed, make_graph_backend

# Architectures whose files are not read, or not in every form that a checkpoint's export writes, and what says so.
UNREAD = {
    "minicpm3": "minicpm3.attention.kv_lora_rank is not known.",
    "qwen35": "blk.0.ssm_out.weight has its columns in another order.",
    "qwen35moe": "blk.0.ssm_out.weight has its columns in another order.",
}
# What the fast tier runs: the families of the files that most people have.
FAST = ("Llama", "Qwen2", "Qwen3", "Gemma3", "Qwen3Moe")
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
READ = [
    *GGUF_CASES,
    ("Llama", {"rope_parameters": LLAMA3}),
    ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3, "rope_parameters": LLAMA3}),
    ("Qwen2", {"rope_parameters": PLAIN | {"rope_type": "linear", "factor": 2.0}}),
]
# Fields that a file cannot say as the checkpoint did: a window that is its whole context, a head stored again, a factor
# of scores that the checkpoint's export has in its queries, pairs of channels that are neighbours in both.
OTHERWISE = {
    "Ministral": ("windows", "max_positions"),
    "Starcoder2": ("windows", "max_positions"),
    "Helium": ("rope",),
    "GraniteMoe": ("attention_scale",),
    "GraniteMoeShared": ("attention_scale",),
    "GraniteMoeSWA": ("attention_scale",),
    "Qwen2Moe": ("tied",),
    "Olmoe": ("tied",),
    "Dots1": ("tied",),
    "Apertus": ("tied",),
    "GraniteMoeHybrid": ("intermediate_size",),
    "NemotronH": ("mamba2", "intermediate_size"),
    "Gemma3n": ("per_layer",),
}

# Tensors that share a factor in other parts, or that the file has more or other rows of.
SHAPED_OTHERWISE: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("GraniteMoe", "GraniteMoeShared", "GraniteMoeSWA", "Helium"), ("qkv",)
)
SHAPED_OTHERWISE |= {"FalconH1": ("final_norm", "head"), "Gemma3n": ("embed.per_layer",)}


@contextmanager
def written(folder: Path, name: str, changes: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    model = make_checkpoint(folder / "checkpoint", name, **changes)
    write_gguf(folder / "checkpoint", folder / "model.gguf", vocabulary=False)
    yield folder / "model.gguf", model


def described(spec: DecoderSpec, name: str) -> dict[str, Any]:
    """What files say as the checkpoint did; Llama 3's rotation as the divisors that its constants give."""
    if spec.rope.type in ("llama3", "longrope"):
        spec = dataclasses.replace(spec, rope=RopeSpec("default", 1.0, spec.rope.dim))
    return {field: value for field, value in vars(spec).items() if field not in OTHERWISE.get(name, ())}


@pytest.mark.parametrize(("name", "changes"), [pytest.param(*case, id=case[0]) for case in READ if case[0] in FAST])
@pytest.mark.every_case
def test_a_common_file_read_back_is_the_checkpoint(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    check(name, changes, tmp_path)


@pytest.mark.parametrize(("name", "changes"), [pytest.param(*case, id=case[0]) for case in READ if case[0] not in FAST])
@pytest.mark.slow
def test_a_file_read_back_is_the_checkpoint(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    check(name, changes, tmp_path)


def check(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    with written(tmp_path, name, changes) as (file, torch_model), Checkpoint(tmp_path / "checkpoint") as checkpoint:
        source, gguf = open_gguf_source(checkpoint), read_gguf(file)
        try:
            model = read_model(gguf)
        except UnsupportedArchitectureError as error:
            assert error.message == UNREAD[source.arch.name]
            return
        assert described(model.spec, name) == described(source.spec, name)
        turned, expected = (inverse_frequencies(each.spec.rope, 0) for each in (model, source))
        np.testing.assert_allclose(turned, expected, rtol=1e-6)
        with GgufTensors(model.gguf, model.shapes) as tensors:
            found, computing = (
                PlannedTensors(*each) for each in ((tensors, model.plans), (checkpoint, source.computing))
            )
            for plan in model.plans:
                if plan.name in computing and not plan.name.endswith(SHAPED_OTHERWISE.get(name, ())):
                    np.testing.assert_allclose(found.tensor(plan.name), computing.tensor(plan.name), atol=1e-6)
        config = read_config(tmp_path / "checkpoint")
        convert_model(model, read_sidecar(tmp_path / "checkpoint", config), tmp_path / "bundle", "read")
        bundle = open_bundle(tmp_path / "bundle")
        backend = make_graph_backend(bundle, 64)
        tokens = TOKENS[: bundle.manifest.geometry.max_positions]
        difference = np.abs(feed(backend, tokens.tolist()) - expected_logits(torch_model, tokens)).max()
        backend.close()
        print(f"{name}: {difference:.1e}")
        assert difference <= 1e-4


@pytest.mark.parametrize(
    ("name", "changes"),
    [("Llama", {}), ("Gemma3", GEMMA | layers(3, 3)), ("Qwen3Moe", EXPERTS | {"norm_topk_prob": True})],
)
@pytest.mark.every_case
def test_blocks_are_kept_as_they_are(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """A Llama's queries and keys in another order, Gemma's factor of embeddings, and experts."""
    changes = changes | {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "head_dim": 32}
    make_checkpoint(tmp_path / "checkpoint", name, **changes)
    write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", "Q8_0", vocabulary=False)
    model = read_model(read_gguf(tmp_path / "model.gguf"))
    sidecar = read_sidecar(tmp_path / "checkpoint", read_config(tmp_path / "checkpoint"))
    convert_model(model, sidecar, tmp_path / "bundle", "kept")
    bundle = open_bundle(tmp_path / "bundle")
    kinds = {entry.name: [each.kind for each in entry.segments] for entry in bundle.manifest.tensors}
    assert kinds["embed"] == kinds["layers.0.attn.qkv"] == ["Q8_0"] and not kinds["final_norm"]
    with GgufTensors(model.gguf, model.shapes) as tensors:
        read = PlannedTensors(tensors, model.plans)
        for plan in model.plans:
            np.testing.assert_array_equal(bundle.tensor(plan.name), read.tensor(plan.name), plan.name)
    backend, reference = make_graph_backend(bundle, 64), Alone(ReferenceBackend(bundle, 64), 64)
    found, exact = (feed(each, TOKENS.tolist()) for each in (backend, reference))
    # Activations are rounded to 8 bits.
    assert np.linalg.norm(found - exact) < 0.05 * np.linalg.norm(exact)
    backend.close()


@pytest.fixture(scope="module")
def eights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in Q8_0, with its checkpoint."""
    folder = tmp_path_factory.mktemp("eights")
    make_checkpoint(folder / "checkpoint", "Llama")
    write_gguf(folder / "checkpoint", folder / "model.gguf", "Q8_0", vocabulary=False)
    return folder


def test_nothing_is_left_of_a_file_with_scales_that_are_no_numbers(eights: Path, tmp_path: Path) -> None:
    data = bytearray((eights / "model.gguf").read_bytes())
    place = read_gguf(eights / "model.gguf").by_name["blk.1.ffn_down.weight"].offset
    data[place : place + 2] = np.float16(np.nan).tobytes()
    (tmp_path / "model.gguf").write_bytes(data)
    sidecar = read_sidecar(eights / "checkpoint", read_config(eights / "checkpoint"))
    with pytest.raises(EdgeInferError, match=r"layers\.1\.mlp\.down has scales"):
        convert_model(read_model(read_gguf(tmp_path / "model.gguf")), sidecar, tmp_path / "bundle")
    assert [each.name for each in tmp_path.iterdir()] == ["model.gguf"]


def test_parts_of_a_split_file_are_read(eights: Path, tmp_path: Path) -> None:
    whole = GGUFReader(eights / "model.gguf")
    writer = GGUFWriter(tmp_path / "part.gguf", "llama", split_max_tensors=5)
    for key, field in whole.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = field.types[0]
            writer.add_key_value(key, field.contents(), kind, field.types[-1] if kind == GGUFValueType.ARRAY else None)
    for tensor in whole.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first, *others = sorted(tmp_path.iterdir())
    parts, alone = read_model(read_gguf(first)), read_model(read_gguf(eights / "model.gguf"))
    assert others and parts.spec == alone.spec and parts.plans == alone.plans
    with GgufTensors(parts.gguf, parts.shapes) as split, GgufTensors(alone.gguf, alone.shapes) as one:
        for name, shape in alone.shapes.items():
            np.testing.assert_array_equal(split.read_packed(name, 0, shape[0]), one.read_packed(name, 0, shape[0]))


# Values that no key expects, or that are far outside of what a model has.
_ODD: tuple[Value, ...] = (
    0,
    -1,
    1,
    3,
    7,
    2**31,
    2**63,
    1.5,
    -1.0,
    0.0,
    math.nan,
    math.inf,
    1e-45,
    True,
    False,
    "",
    "x",
)
DAMAGED = {
    "Llama": {},
    "Gemma3": GEMMA | layers(3, 3) | {"rope_parameters": ROPES},
    "GraniteMoeSWA": GRANITE | ROUTED_SWA,
}
DAMAGED["GraniteMoeSWA"] |= layers(3, 3) | {"shared_intermediate_size": 64}


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> list[GgufFile]:
    found = []
    for name, changes in DAMAGED.items():
        with written(tmp_path_factory.mktemp(name), name, changes) as (file, _):
            found.append(read_gguf(file))
    return found


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_damaged_headers_are_refused_in_one_line(headers: list[GgufFile], data: st.DataObject) -> None:
    gguf = data.draw(st.sampled_from(headers))
    metadata, tensors = dict(gguf.metadata), list(gguf.tensors)
    own = sorted(key for key in metadata if key.startswith(gguf.metadata.text("general.architecture")))
    for _ in range(data.draw(st.integers(1, 3))):
        key, index = data.draw(st.sampled_from(own)), data.draw(st.integers(0, len(tensors) - 1))
        match data.draw(st.sampled_from(("change", "remove", "add", "shape", "name", "type", "lose"))):
            case "change":
                metadata[key] = data.draw(
                    st.sampled_from((*_ODD, *(v for v in metadata.values() if not isinstance(v, str))))
                )
            case "remove":
                metadata.pop(key, None)
            case "add":
                metadata[key + data.draw(st.sampled_from(("_swa", "_pattern", ".x")))] = data.draw(
                    st.sampled_from(_ODD)
                )
            case "shape":
                shape = data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=4))
                tensors[index] = dataclasses.replace(tensors[index], shape=tuple(shape))
            case "name":
                tensors[index] = dataclasses.replace(tensors[index], name=tensors[index].name.replace("blk.0", "blk.9"))
            case "type":
                tensors[index] = dataclasses.replace(
                    tensors[index], type=data.draw(st.sampled_from([*GGML_TYPES.values()]))
                )
            case "lose":
                del tensors[index]
    said = look(GgufFile(Metadata(gguf.path, metadata), tuple(tensors), gguf.splits))
    assert not isinstance(said, str) or (said and "\n" not in said and len(said) < 400)


def test_windows_that_the_graph_of_a_family_lacks_are_those_of_all_layers(headers: list[GgufFile]) -> None:
    gguf = headers[0]
    for window, slides in ((0, False), (5, True), (gguf.metadata.integer("llama.context_length"), False)):
        metadata = Metadata(gguf.path, gguf.metadata | {"llama.attention.sliding_window": window})
        spec = read_model(GgufFile(metadata, gguf.tensors, gguf.splits)).spec
        assert spec.windows == ((window,) * spec.num_layers if slides else ())


def test_malformed_files_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    """One after the other; those that are not are named."""
    file, read = tmp_path / "model.gguf", []
    for name, case in CASES.items():
        made = case()
        file.write_bytes(made if isinstance(made, bytes) else made.build())
        said = look(file)
        if not isinstance(said, str) or not said.isprintable() or len(said) > 400 + len(str(file)):
            read.append(name)
        with pytest.raises(EdgeInferError):
            convert_gguf(file, tmp_path / "bundle")
        assert [*tmp_path.iterdir()] == [file], name
    assert read == []
