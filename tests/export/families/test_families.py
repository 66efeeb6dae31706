"""Every family of checkpoints, exported and run, against transformers: chunks, rollback, trees, replies, few bits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from edgeinfer.bundle.layouts import NATIVE
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.packing import find_expert
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import CheckpointError
from edgeinfer.export.architectures import find_architecture
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from edgeinfer.export.source.hf_config import HFConfig, completed
from edgeinfer.quant.calibration_layers import LayerWalk, Signal
from edgeinfer.runtime.backends.contract import Pass
from edgeinfer.runtime.backends.onnx.backend import OnnxBackend
from edgeinfer.runtime.backends.onnx.paged_backend import PagedBackend
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.native.library import LIBRARY
from tests.alone import Alone
from tests.export.families.table import FAMILIES, Family, cases
from tests.export.passes import TOKENS, expected_logits
from tests.factories import COMMON, make_block_ffn_checkpoint, make_checkpoint, make_tokenizer, randomise

ROOT = Path(__file__).parents[3]
TOLERANCE = 1e-4
CONTEXT, REPLY = 48, 24
Floats = NDArray[np.float32]


def run(backend: Alone[Any], tokens: Any, tree: list[int] | None = None, places: list[int] | None = None) -> Floats:
    start, size = backend.cache.length, len(tokens)
    positions = np.arange(start, start + size) if places is None else np.array(places)
    parents = None if tree is None else np.array(tree)
    given = Pass(np.asarray(tokens, np.int64), positions, np.arange(size), tree=parents)
    return backend.forward(given).logits.copy()


def backends(bundle: Bundle, family: Family) -> Iterator[Alone[Any]]:
    """Backends of both layouts that run here."""
    if LIBRARY.is_file():
        yield Alone(PagedBackend(bundle, CONTEXT), CONTEXT)
    if family.portable:
        yield Alone(OnnxBackend(bundle, CONTEXT), CONTEXT)


def walked(bundle: Bundle) -> Floats:
    """What calibration computes: every layer over the whole text."""
    spec = bundle.manifest.decoder
    assert spec is not None
    if spec.kv_sources or spec.per_layer is not None or (spec.moe is not None and spec.moe.with_mlp):
        return run(Alone(ReferenceBackend(bundle, CONTEXT), CONTEXT), TOKENS)
    walk = LayerWalk(spec, bundle.tensor, [len(TOKENS)], lambda name, weight, seen: weight, (False,), hessian=False)
    states: Signal = (bundle.tensor("embed")[TOKENS],)
    for layer in range(spec.num_layers):
        states = walk.run(layer, states)
    return walk.logits(*states)


def chunks(backend: Alone[Any]) -> Floats:
    return np.concatenate([run(backend, part) for part in (TOKENS[:7], TOKENS[7:8], TOKENS[8:])])


def back(backend: Alone[Any], length: int) -> None:
    """Goes back to so many of TOKENS, some of which are evaluated again where the cache cannot."""
    start = backend.cache.rewindable_to(length)
    backend.cache.trim(start)
    if start < length:
        run(backend, TOKENS[start:length])


def branches(backend: Alone[Any]) -> Floats:
    """The last three tokens but one as a chain in a tree with siblings; of those rows."""
    back(backend, 7)
    return run(backend, [TOKENS[7], 9, TOKENS[8], 11, TOKENS[9]], [-1, -1, 0, 0, 2], [7, 7, 8, 8, 9])[[0, 2, 4]]


def reply(backend: Alone[Any]) -> list[int]:
    """What is decoded greedily after TOKENS, whose last rows a rollback dropped."""
    back(backend, 4)
    tokens = [int(run(backend, TOKENS[4:])[-1].argmax())]
    while len(tokens) < REPLY:
        tokens.append(int(run(backend, tokens[-1:])[0].argmax()))
    return tokens


def check(family: Family, settings: Any, folder: Path) -> None:
    model = make_checkpoint(folder / "checkpoint", family.name, **settings)
    expected = expected_logits(model, TOKENS)
    bundle = open_bundle(export_checkpoint(folder / "checkpoint", folder / "floats", ExportConfig(bits=32)))
    assert np.abs(run(Alone(ReferenceBackend(bundle, CONTEXT), CONTEXT), TOKENS) - expected).max() <= TOLERANCE
    assert np.abs(walked(bundle) - expected).max() <= TOLERANCE
    for backend in backends(bundle, family):
        assert np.abs(chunks(backend) - expected).max() <= TOLERANCE
        assert np.abs(branches(backend) - expected[7:10]).max() <= TOLERANCE
        said = reply(backend)
        theirs = expected_logits(model, np.array([*TOKENS, *said[:-1]]))[len(TOKENS) - 1 :]
        # A tie may be decided otherwise.
        assert (theirs.max(axis=1) - theirs[range(REPLY), said] <= TOLERANCE).all()


def check_few_bits(family: Family, folder: Path) -> None:
    config = ExportConfig(bits=4, group_size=32, keep_small=False, calibration="none")
    bundle = open_bundle(export_checkpoint(folder / "checkpoint", folder / "few-bits", config))
    wanted = run(Alone(ReferenceBackend(bundle, CONTEXT), CONTEXT), TOKENS)
    assert bundle.manifest.decoder is not None
    # Experts that no group divides stay floats, which ONNX Runtime multiplies.
    float_experts = any(t.bits == 32 and find_expert(t.name) for t in bundle.manifest.tensors)
    for backend in backends(bundle, family):
        whole = run(backend, TOKENS)
        # Where a router's scores are nearly even, rounding chooses other experts for a token: most rows are near then.
        error = np.linalg.norm(whole - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
        assert np.median(error) <= family.rounded
        assert bundle.manifest.decoder.moe or error.max() <= 2 * family.rounded
        if isinstance(backend, PagedBackend) and not float_experts:
            backend.cache.clear()
            assert np.array_equal(chunks(backend), whole)
            assert np.array_equal(branches(backend), whole[7:10])


@pytest.mark.every_case
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_each_family_computes_what_transformers_does(family: Family, tmp_path: Path) -> None:
    check(family, family.settings[0], tmp_path)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_each_family_keeps_to_the_reference_in_few_bits(family: Family, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", family.name, **family.settings[0])
    check_few_bits(family, tmp_path)


FURTHER = [pytest.param(family, place, id=f"{family.name}-{place}") for family, place in cases() if place]


@pytest.mark.parametrize(("family", "place"), FURTHER)
def test_its_other_configurations_do_too(family: Family, place: int, tmp_path: Path) -> None:
    check(family, family.settings[place], tmp_path)
    check_few_bits(family, tmp_path)


def test_blockffn_with_latent_attention(tmp_path: Path) -> None:
    model = make_block_ffn_checkpoint(tmp_path / "checkpoint", joined=False, latent=True)
    bundle = open_bundle(export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", ExportConfig(bits=32)))
    expected, family = expected_logits(model, TOKENS), Family("BlockFFN", "MiniCPM", ({},), portable=False)
    for backend in (Alone(ReferenceBackend(bundle, CONTEXT), CONTEXT), *backends(bundle, family)):
        assert np.abs(run(backend, TOKENS) - expected).max() <= TOLERANCE


def test_the_page_lists_every_family() -> None:
    page = (ROOT / "docs" / "families.md").read_text("utf-8")
    listed = re.findall(r"^\| ([^|]+?) +\| [\d.]+e-\d\d", page, re.MULTILINE)
    assert listed == [family.title for family in FAMILIES], "run: python -m tests.export.families.page"
    assert NATIVE in page


_EYES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_EYES |= {"image_size": 28, "patch_size": 14}
_QWEN_EYES: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
}
_QWEN_EYES |= {"patch_size": 14, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
# By the name of the class: its language model's family, and what its configuration has besides.
SEEING: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Gemma3": ("Gemma3", {}, {"vision_config": _EYES, "mm_tokens_per_image": 1}),
    "Gemma4": ("Gemma4", {}, {"vision_config": _EYES | {"num_key_value_heads": 2, "head_dim": 16}}),
    "Qwen2VL": (
        "Qwen2",
        {"rope_parameters": _SECTIONS},
        {"vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}},
    ),
    "Qwen2_5_VL": ("Qwen2", {"rope_parameters": _SECTIONS}, {"vision_config": _QWEN_EYES}),
    "Qwen3VL": ("Qwen3", {"rope_parameters": _SECTIONS, "head_dim": 16}, {"vision_config": _QWEN_EYES}),
    "Mistral3": ("Ministral3", {"model_type": "ministral3"}, {"vision_config": _EYES | {"model_type": "pixtral"}}),
}


@pytest.mark.parametrize("name", SEEING)
@pytest.mark.parametrize("root", ["language_model.model.", "model.language_model."], ids=["outside", "inside"])
def test_the_language_model_of_one_that_sees(name: str, root: str, tmp_path: Path) -> None:
    if name.startswith("Qwen"):
        root = root.removeprefix("language_model.")  # the names that these have had
    language, kind, further = SEEING[name]
    family = next(family for family in FAMILIES if family.name == language)
    text = {**COMMON, **family.settings[0], **kind}
    config = getattr(transformers, f"{name}Config")(text_config=text, **further)
    config.architectures = [f"{name}ForConditionalGeneration"]
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    randomise(model, 0)
    model.save_pretrained(tmp_path / "checkpoint")
    make_tokenizer(tmp_path / "checkpoint", None)
    rename(tmp_path / "checkpoint" / "model.safetensors", root)
    bundle = open_bundle(export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", ExportConfig(bits=32)))
    with torch.no_grad():
        expected = model(torch.from_numpy(TOKENS)[None]).logits[0].numpy()
    assert np.abs(run(next(backends(bundle, family)), TOKENS) - expected).max() <= TOLERANCE


_ROOT = re.compile(r"^(model\.language_model\.|language_model\.model\.)")


def rename(file: Path, root: str) -> None:
    """Puts the language model's tensors where other releases of transformers do."""
    tensors = {_ROOT.sub(root, name): t for name, t in safetensors.torch.load_file(file).items()}
    safetensors.torch.save_file(tensors, file)


@pytest.mark.parametrize(
    "name", ["Olmo2", "Cohere", "Starcoder2", "Gemma2", "Dots1", "MiniCPM3", "Qwen3_5", "FalconH1"]
)
def test_rounding_for_a_text_keeps_what_a_family_computes(name: str, tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    model = make_checkpoint(tmp_path / "checkpoint", name, **family.settings[0])
    (tmp_path / "text.txt").write_text("Once upon a time there was a little dog. The dog had a red ball.\n" * 8)
    config = ExportConfig(
        bits=8,
        group_size=32,
        calibration=tmp_path / "text.txt",
        calibration_tokens=96,
        keep_small=family.portable,  # all small matrices of latent attention are rounded
    )
    bundle = open_bundle(export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", config))
    expected, found = expected_logits(model, TOKENS), run(Alone(ReferenceBackend(bundle, CONTEXT), CONTEXT), TOKENS)
    error = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert np.median(error) <= family.rounded / 2


_SLOW = ("Gemma3", "Gemma3n", "Qwen3Moe", "Qwen3_5", "Mamba2", "Cohere2", "FalconH1")


@pytest.mark.parametrize("name", ["Llama", *(pytest.param(name, marks=pytest.mark.slow) for name in _SLOW)])
def test_it_is_the_same_decoder(name: str, tmp_path: Path) -> None:
    settings = next(family.settings[0] for family in FAMILIES if family.name == name)
    make_checkpoint(tmp_path / "whole", name, **{**settings, "tie_word_embeddings": True})
    make_checkpoint(tmp_path / "base", name, **{**settings, "tie_word_embeddings": True})
    transformers.AutoModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "base")
    whole, base = (
        export_checkpoint(tmp_path / kind, tmp_path / f"{kind}-bundle", ExportConfig(bits=32))
        for kind in ("whole", "base")
    )
    assert (base / "weights.bin").read_bytes() == (whole / "weights.bin").read_bytes()


def test_one_whose_head_is_missing_is_refused_by_name(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "base", "Llama")
    transformers.AutoModel.from_pretrained(tmp_path / "base").save_pretrained(tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"no tensor 'lm_head\.weight'"):
        export_checkpoint(tmp_path / "base", tmp_path / "bundle", ExportConfig(bits=32))


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_a_head_is_the_embedding_where_it_is_its_copy(factor: float, tmp_path: Path) -> None:
    """Transformers uses a head with other values, though config.json says that it is tied."""
    folder = tmp_path / "checkpoint"
    make_checkpoint(folder, "Llama", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = np.float32(factor) * tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    bundle = open_bundle(export_checkpoint(folder, tmp_path / "bundle", ExportConfig(bits=32)))
    assert bundle.manifest.decoder is not None and bundle.manifest.decoder.tied == (factor == 1)
    expected = expected_logits(transformers.AutoModelForCausalLM.from_pretrained(folder), TOKENS)
    found = run(Alone(ReferenceBackend(bundle, len(TOKENS)), len(TOKENS)), TOKENS)
    assert np.abs(found - expected).max() <= TOLERANCE


_WINDOW = {"sliding_window": 64, "hidden_activation": "gelu_pytorch_tanh"}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "attention_factor": 1.2}
_SCAN = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}
OLDER: dict[str, dict[str, Any]] = {
    "Apertus": {"hidden_act": "xielu", "rope_scaling": _LLAMA3 | {"original_max_position_embeddings": 64}},
    "Cohere2": _WINDOW | {"sliding_window_pattern": 4, "rope_theta": 5e4, "logit_scale": 0.25},
    "FalconH1": _SCAN | {"mamba_d_ssm": 96, "rope_theta": 1e11, "rope_scaling": None},
    "GraniteMoeHybrid": _SCAN
    | {"layer_types": ["mamba", "attention"] * 4, "position_embedding_type": "nope", "num_local_experts": 0}
    | {"mamba_expand": 2, "mamba_n_heads": 8, "shared_intermediate_size": 96},
    "NemotronH": {"hybrid_override_pattern": "M-M*-M-M", "mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 2}
    # Published configurations bring their own code along, whose time steps differ from those of transformers.
    | {"auto_map": {"AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"}},
    "Gemma": {"head_dim": 32, "hidden_act": "gelu", "hidden_activation": None},
    "Gemma2": _WINDOW
    | {"final_logit_softcapping": 30.0, "query_pre_attn_scalar": 24, "head_dim": 32}
    | {"attn_logit_softcapping": 50.0},
    "Gemma3": _WINDOW
    | {"rope_local_base_freq": 1e4, "rope_theta": 1e6, "sliding_window_pattern": 6, "head_dim": 32}
    | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    "Glm4": {"partial_rotary_factor": 0.5, "head_dim": 32, "attention_bias": True},
    "HunYuanDenseV1": {"head_dim": 32, "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}},
    "Olmo3": {"layer_types": [*["sliding_attention"] * 7, "full_attention"], "sliding_window": 64}
    | {"rope_scaling": _YARN, "rope_theta": 5e5},
    "Phi": {"partial_rotary_factor": 0.4, "hidden_act": "gelu_new", "rope_theta": 1e4, "rope_scaling": None},
    "SmolLM3": {"no_rope_layers": [1, 1, 1, 0] * 2, "rope_theta": 5e6, "use_sliding_window": False},
    "StableLm": {"partial_rotary_factor": 0.25, "use_qkv_bias": True, "rope_theta": 1e4},
}


def test_they_describe_the_same_decoder() -> None:
    for name in OLDER:
        older = COMMON | {"num_hidden_layers": 8} | OLDER[name] | {"architectures": [f"{name}ForCausalLM"]}
        class_ = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")
        # What transformers of today makes of it has every field under its present name.
        today = class_(**older).to_dict() | {"architectures": older["architectures"]}
        family = find_architecture(HFConfig(older))
        read = family.read(HFConfig(completed(older, class_.model_type)), False)
        assert read == family.read(HFConfig(today), False), name
