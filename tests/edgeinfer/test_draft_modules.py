"""Draft modules from published checkpoints to replies: what they draft, which text comes of it, what is refused."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import edgeinfer
from edgeinfer.bundle.array_file import encode_arrays
from edgeinfer.bundle.conversion import convert_bundle
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.core.errors import ModelError, UnsupportedArchitectureError, UsageError
from edgeinfer.core.results import SpeculationUse, TokenLogprob
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from tests.cache import made
from tests.dflash_drafters import ReferenceDrafter, make_drafter
from tests.draft_modules import (
    PROMPT,
    WAYS,
    Damage,
    change_config,
    change_tensors,
    drafted_logits,
    export_with_module,
    read_texts,
    require_logits,
    require_other_verifications,
    require_planned,
    require_refused,
    require_same_near_the_end,
)
from tests.eagle_heads import ReferenceHead, make_head
from tests.factories import make_checkpoint
from tests.hydra_modules import ReferenceHydra, make_hydra
from tests.kernel import require_kernel
from tests.mtp_modules import NextLayerReference, ReferenceModule, add_module, add_next_layer
from tests.speculation import load_eager, same

Logits = Callable[[Sequence[int], Sequence[int]], torch.Tensor]  # of a text and a path behind it: (V,)
MAKERS: dict[str, Callable[..., Path]] = {"eagle": make_head, "hydra-plus": make_hydra, "dflash": make_drafter}
EAGLE3: dict[str, Any] = {"form": "eagle3", "drafted": 120}
_NAMED = {"norm_before_residual": True, "norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [1, 4, 5]}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20, "use_sliding_window": True}
_SCALED = {"input_embedding_scale": 3.0, "output_multiplier": 0.7, "final_logit_softcapping": 5.0}
# The drafter, the target's family, the module, and what the target's config.json says besides.
KINDS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "eagle3": ("eagle", "llama", EAGLE3, {}),
    "eagle3 with other names and norms": ("eagle", "llama", {"form": "eagle3-layers", **_NAMED}, {}),
    "eagle3 of a mixture": ("eagle", "mixtral", EAGLE3, {}),
    "eagle1": ("eagle", "llama", {"form": "eagle1"}, {}),
    "hydra-plus": ("hydra-plus", "llama", {}, {}),
    # Gemma's embedding is stored multiplied, and its norms are stored without a one.
    "hydra-plus of one layer": ("hydra-plus", "Gemma3", {"heads": 4, "layers": 1}, {}),
    "hydra-plus of a mixture": ("hydra-plus", "mixtral", {}, {}),
    "dflash": ("dflash", "llama", {}, {}),
    "dflash by the rule": ("dflash", "qwen3", {"layers": 1, "taps": None, "block": 16}, {}),
    "dflash of a mixture": ("dflash", "mixtral", {}, {}),
    "dflash of a hybrid": ("dflash", "Lfm2", {}, {"layer_types": ["conv", "conv", "full_attention"] * 2}),
    "dflash with a tied head": ("dflash", "Gemma3", _SCALED, {"tie_word_embeddings": True}),
    "dflash with windows": ("dflash", "llama", _WINDOWS, {}),
}
_SHAPE: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_SHAPE |= {"num_hidden_layers": 3, "max_position_embeddings": 512, "linear_num_key_heads": 2, "head_dim": 32}
_SHAPE |= {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24}
_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_EXPERTS["shared_expert_intermediate_size"] = 64
# Families whose checkpoints bring a module for multi-token prediction.
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3_5": _SHAPE,
    "Qwen3Next": _SHAPE | _EXPERTS | {"mlp_only_layers": [1]},
    "Qwen3_5Moe": _SHAPE | _EXPERTS | {"tie_word_embeddings": True},
}
_ROUTED = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 1}
_ROUTED |= {"first_k_dense_replace": 1, "num_hidden_layers": 3, "n_group": 1, "topk_group": 1}
_ROUTED |= {"max_position_embeddings": 512}
_LATENT = {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
_LATENT |= {"num_key_value_heads": 4}
# Families where the layer behind the last one predicts.
NEXT_LAYERS: dict[str, dict[str, Any]] = {
    "DeepseekV3": _ROUTED | _LATENT | {"n_group": 3, "topk_group": 2},
    "Glm4Moe": _ROUTED | {"attention_bias": True, "use_qk_norm": True},
    "Glm4MoeLite": _ROUTED | _LATENT | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
}


def make_bundle(folder: Path, kind: str, bits: int) -> None:
    """Makes a target, its module and the bundle of both."""
    if kind in KINDS:
        drafter, family, settings, sizes = KINDS[kind]
        make = MAKERS[drafter]
        export_with_module(folder, family, bits, lambda own, target: make(own, target, **settings), **sizes)
        return
    make_checkpoint(folder / "target", kind, seed=2, **(FAMILIES | NEXT_LAYERS)[kind])
    if kind in FAMILIES:
        add_module(folder / "target")
    else:
        add_next_layer(folder / "target", folder / "layer")
    export_checkpoint(
        folder / "target", folder / "bundle", ExportConfig(bits=bits, keep_small=False, calibration="none")
    )


def bundle_of(kind: str, bits: int = 4) -> Path:
    return made(make_bundle, kind, bits) / "bundle"


def drafter_of(kind: str) -> str:
    return KINDS[kind][0] if kind in KINDS else "mtp"


def reference_of(folder: Path, kind: str) -> Logits:
    """What the published code drafts with."""
    if kind in FAMILIES:
        return ReferenceModule(folder / "target").logits
    if kind in NEXT_LAYERS:
        return NextLayerReference(folder / "target", folder / "layer").logits
    if drafter_of(kind) == "dflash":
        block = ReferenceDrafter(folder / "drafter", folder / "target")
        return lambda text, path: block.logits(text)[len(path)]
    reference = ReferenceHead if drafter_of(kind) == "eagle" else ReferenceHydra
    return reference(folder / "drafter", folder / "target").logits


# What a checkpoint drafts at most; eagle heads and multi-token prediction go on.
LONGEST = {"hydra-plus": 3, "hydra-plus of one layer": 4, "dflash by the rule": 15}
QUICK = ("eagle3", "eagle3 with other names and norms", "eagle1", "Qwen3_5")
DRAFTING = [kind for kind in (*KINDS, *FAMILIES, *NEXT_LAYERS) if "mixture" not in kind and "hybrid" not in kind]


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in DRAFTING]
)
def test_it_drafts_what_the_published_code_drafts(kind: str) -> None:
    """Behind prompts and replies, chains and trees, along paths that part."""
    folder, drafter = made(make_bundle, kind, 32), drafter_of(kind)
    logits, options = reference_of(folder, kind), dict[str, Any]()
    # Where some tokens are likelier, copies of them are accepted.
    if drafter == "mtp":
        options["logit_bias"] = dict.fromkeys((7, 9, 11), 30.0 if kind in FAMILIES else 1.0)
    elif KINDS[kind][1] == "Gemma3":
        options["logit_bias"] = dict.fromkeys((7, 9, 11), 3.0)
    block = drafter == "dflash"
    for module, text in read_texts(folder / "bundle", drafter, **options):
        longest = LONGEST.get(kind, 5 if block else None)
        paths: Sequence[list[int]] = ([], [7], [7, 9], [7, 9, 11], [7, 12], [5, 9], [5, 6, 7, 8], [])
        for path in [[7] * place for place in range(longest or 0)] if block else paths:
            if longest is None or len(path) < longest:
                require_logits(module, text, path, logits(text, path).numpy())
        assert longest is None or drafted_logits(module, text, [7] * longest) is None


@pytest.mark.parametrize(
    ("kind", "threads", "kv"),
    [
        ("eagle3", 1, "float32"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("hydra-plus", 1, "float32"),
                ("dflash", 2, "int8"),
                ("dflash by the rule", 1, "float32"),
                ("dflash of a mixture", 2, "float16"),
                ("dflash of a hybrid", 1, "int4"),
            )
        ),
    ],
)
def test_text_is_that_of_plain_decoding(kind: str, threads: int, kv: str) -> None:
    name = drafter_of(kind)
    with load_eager(bundle_of(kind), context=256, threads=threads, kv=kv, remember=False) as model:
        for who, way in [*((name, way) for way in WAYS), ("auto", "tree"), (f"copy,recycle,{name}", "sampled tree")]:
            # What random modules taught would keep them from drafting at all.
            edgeinfer.tools.restore_drafting(model, {})
            found = same(model, who, prompt=PROMPT, max_tokens=24, ignore_eos=True, **WAYS[way])
            assert (found.exact, found.lossless) == (True, True)
            assert name in found.per_drafter
        for length in (1, 2, 63, 65, 200):
            same(model, name, prompt=(PROMPT * 3)[:length], max_tokens=8, ignore_eos=True)
        require_other_verifications(model, name)


# Chains and trees, greedy and drawn, of the module alone and with drafters whose branches are accepted and built on.
OWN, ALL = "own", "all"
FURTHER: tuple[tuple[str, dict[str, Any]], ...] = (
    (OWN, {}),
    (OWN, {"draft_width": 3, "temperature": 1.0, "seed": 11}),
    (ALL, {"draft_width": 3}),
    (ALL, {"temperature": 0.7, "seed": 3}),
)
# Every cache, and the threads that replies are drafted with; the last one has no byte more than it needs.
CACHES = {"float32": 1, "float16": 2, "int8": 1, "int4": 2}
EXACT = ["eagle3", "eagle1", "eagle3 of a mixture", "Qwen3_5", "Qwen3Next", "DeepseekV3", "Glm4Moe"]
EXACT += ["hydra-plus of a mixture"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXACT)
def test_text_and_probabilities_are_those_of_plain_decoding(kind: str) -> None:
    bundle, own = bundle_of(kind), drafter_of(kind)
    for place, (kv, threads) in enumerate(CACHES.items()):
        who = f"copy,recycle,{own}"
        options: dict[str, Any] = {"context": 128, "kv": kv, "speculation": who}
        # Each cache meets both numbers of threads with half of the kinds.
        options["threads"] = 1 + (threads + EXACT.index(kind)) % 2
        if place == len(CACHES) - 1:
            options["memory"] = edgeinfer.plan(bundle, **options).minimum_bytes
        with load_eager(bundle, **options, remember=False) as model:
            for asked, way in FURTHER:
                expected, _ = drawn(model, "off", **way)
                found, use = drawn(model, own if asked == OWN else who, **way)
                assert found == expected and len(found) == 16
                assert (use.exact, use.lossless) == (True, True)
                assert asked != OWN or use.per_drafter[own].drafted > 0


def drawn(model: edgeinfer.Model, who: str, **options: Any) -> tuple[list[TokenLogprob], SpeculationUse]:
    """The tokens of a reply with their log-probabilities, and what drafting did."""
    edgeinfer.tools.restore_drafting(model, {})
    stream = model.stream(PROMPT[:70], max_tokens=16, ignore_eos=True, logprobs=3, speculation=who, **options)
    return [token for chunk in stream for token in chunk.logprobs], stream.result.speculation


@pytest.mark.parametrize(
    "kind", ["eagle3", "eagle1", *(pytest.param(each, marks=pytest.mark.slow) for each in ("hydra-plus", "dflash"))]
)
def test_a_context_that_fills_up_and_memory_that_is_planned(kind: str) -> None:
    require_same_near_the_end(bundle_of(kind), drafter_of(kind), (1, 9, 17, 20, 22, 24))
    require_planned(bundle_of(kind), drafter_of(kind))


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("kind", ["eagle3", "Qwen3_5"])
def test_modules_draft_for_each_adapter(kind: str, width: int, tmp_path: Path) -> None:
    require_kernel()
    bundle = bundle_of(kind, 8)
    adapters = {name: adapt_everything(tmp_path / name, bundle, seed) for seed, name in enumerate(("a", "b"))}
    found, drafts = set(), dict[str | None, int]()
    # Kept prefixes are of the adapter that made them.
    with load_eager(bundle, context=256, adapters=adapters, prefix_cache="20MB", remember=False) as model:
        for adapter in ("a", None, "b", "b", "a"):
            options: dict[str, Any] = {"max_tokens": 24, "adapter": adapter, "ignore_eos": True, "temperature": 0}
            edgeinfer.tools.restore_drafting(model, {})
            drafted = model.generate(PROMPT[:60], speculation=drafter_of(kind), draft_width=width, **options)
            plain = model.generate(PROMPT[:60], speculation="off", **options)
            assert drafted.token_ids == plain.token_ids
            drafts[adapter] = drafts.get(adapter, 0) + drafted.speculation.drafted
            found.add(plain.token_ids)
    assert len(found) == 3
    assert all(drafts.values()), drafts


def adapt_everything(folder: Path, bundle: Path, seed: int) -> str:
    """An adapter of all modules that a bundle's matrices are made of, with random factors."""
    folder.mkdir()
    draw, rank, arrays = np.random.default_rng(seed), 4, {}
    for entry in open_bundle(bundle).manifest.tensors:
        for module in entry.modules:
            name = f"base_model.model.{module.name}.lora_"
            arrays[f"{name}A.weight"] = draw.normal(0, 0.1, (rank, entry.shape[1])).astype(np.float32)
            arrays[f"{name}B.weight"] = draw.normal(0, 0.1, (module.outputs, rank)).astype(np.float32)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(encode_arrays(arrays, {}))
    return str(folder)


# What is refused, and what models run without.


def _without(name: str) -> Damage:
    return change_tensors(lambda tensors: tensors.pop(name)), name.removeprefix("midlayer.")


def _shaped(name: str, *shape: int) -> Damage:
    damage = change_tensors(lambda tensors: tensors.update({name: torch.zeros(shape)}))
    return damage, rf"shape \({shape[0]}, {shape[1]}\)"


def _add_to(tensors: dict[str, torch.Tensor], name: str, place: int, more: int) -> None:
    tensors[name][place] += more


def _layers(nested: str, name: str, layers: list[int]) -> Damage:
    return change_config(nested, **{name: layers}), rf"reads the layers \[{', '.join(map(str, layers))}\]"


DAMAGES: dict[str, dict[str, Damage]] = {
    "eagle3": {
        "layers": _layers("", "eagle_aux_hidden_state_layer_ids", [1, 2, 7]),
        "no layers": _layers("", "eagle_aux_hidden_state_layer_ids", []),
        "deep": (change_config(num_hidden_layers=2), "of 2 layers"),
        "map too short": (change_config(draft_vocab_size=121), "has 120 tokens, config.json says 121"),
        "map outside": (change_tensors(lambda t: _add_to(t, "d2t", -1, 10**6)), "outside a vocabulary"),
        "map twice": (change_tensors(lambda t: t["d2t"].copy_(-torch.arange(120))), "name a token twice"),
        "maps differ": (change_tensors(lambda t: t["t2d"].fill_(False)), "d2t and t2d"),
        "no fc": (change_tensors(lambda t: t.pop("fc.weight")), "no EAGLE head"),
        "no norm": _without("norm.weight"),
        "part of a layer": _without("midlayer.mlp.up_proj.weight"),
        "fc of four layers": _shaped("fc.weight", 64, 256),
    },
    "hydra-plus": {
        "heads": (change_config("hydra_config", num_heads=9), "has num_heads = 9"),
        "too many heads": (change_config("hydra_config", num_heads=4), "heads.3.first"),
        "layers": (change_config("hydra_config", num_layers="3"), "has num_layers = '3'"),
        "map too short": (change_config(draft_vocab_size=121), "has 120 tokens, config.json says 121"),
        "map outside": (change_tensors(lambda t: t["d2t"].add_(10**6)), "outside a vocabulary"),
        "no map": (change_tensors(lambda t: t.pop("d2t")), "has a vocabulary of drafts of 120"),
        "no norm": _without("state_norm.weight"),
        "part of a layer": _without("layers.0.mlp.up_proj.weight"),
        "a narrow head": _shaped("heads.1.first.linear.weight", 64, 128),
    },
    "dflash": {
        "layers": _layers("dflash_config", "target_layer_ids", [1, 5]),
        "no layers": _layers("dflash_config", "target_layer_ids", []),
        "mask": (change_config("dflash_config", mask_token_id=10**6), "has the mask token 1000000"),
        "no mask": (change_config("dflash_config", mask_token_id=None), "has the mask token None"),
        "DFlash 2": (change_config("dflash_config", conv_kernel_size=3), "is one of DFlash 2"),
        "ahead": (
            change_config(layer_types=["sliding_attention"] * 2, sliding_window=20, is_causal=False),
            "windows that reach ahead",
        ),
        "scale": (change_config("dflash_config", output_multiplier="1"), "has output_multiplier = '1'"),
        "block": (change_config(block_size=1), "blocks of 1 tokens"),
        "no fc": _without("fc.weight"),
        "no norm": _without("hidden_norm.weight"),
        "part of a layer": _without("layers.1.mlp.up_proj.weight"),
        "fc of four layers": _shaped("fc.weight", 64, 256),
    },
}


@pytest.mark.parametrize(
    "kind", ["eagle3", *(pytest.param(each, marks=pytest.mark.slow) for each in ("hydra-plus", "dflash"))]
)
def test_a_module_that_does_not_fit_is_refused(kind: str, tmp_path: Path) -> None:
    source = made(make_bundle, kind, 4)
    others: dict[str, Damage] = {
        "hidden size": (change_config(hidden_size=128), "has a hidden size of 128, the model one of 64"),
        "vocabulary": (change_config(vocab_size=999), "has a vocabulary of 999"),
    }
    require_refused(source / "target", source / "drafter", others | DAMAGES[kind], tmp_path)


@pytest.mark.parametrize("kind", ["Qwen3_5", pytest.param("DeepseekV3", marks=pytest.mark.slow)])
def test_a_model_runs_without_an_incomplete_module(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In one line, and everything else is as it was."""
    source = made(make_bundle, kind, 4)
    incomplete = {
        "Qwen3_5": ("mtp.norm.weight", "mtp.layers.0.self_attn.k_proj.weight"),
        "DeepseekV3": ("model.layers.3.eh_proj.weight", "model.layers.3.mlp.experts.2.up_proj.weight"),
    }
    for lacking in incomplete[kind]:
        folder = Path(shutil.copytree(source / "target", tmp_path / lacking))
        tensors = load_file(folder / "model.safetensors")
        del tensors[lacking]
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        with caplog.at_level(logging.WARNING, "edgeinfer"):
            bundle = export_checkpoint(
                folder, tmp_path / "out" / lacking, ExportConfig(bits=4, keep_small=False, calibration="none")
            )
        assert caplog.messages[-1].startswith("The model is exported without its module") and lacking in caplog.text
        assert not open_bundle(bundle).manifest.drafters
        assert (bundle / "weights.bin").read_bytes() == (source / "bundle" / "weights.bin").read_bytes()
        caplog.clear()


@pytest.mark.parametrize("kind", ["eagle1", "Qwen3_5"])
def test_embedding_and_head_are_stored_once(kind: str) -> None:
    inside = open_bundle(bundle_of(kind) / "drafter").manifest
    assert inside.module is not None and inside.module.shares == ("embed", "head")
    assert not {"embed", "head"} & {tensor.name for tensor in inside.tensors}


def test_a_module_is_no_model(tmp_path: Path) -> None:
    bundle = bundle_of("eagle3")
    with pytest.raises(ModelError, match="is the draft module of a bundle"):
        edgeinfer.load(bundle / "drafter")
    with edgeinfer.load(bundle, context=64, native=False, remember=False) as model:
        assert model.generate(PROMPT[:9], max_tokens=4, ignore_eos=True).token_ids
    with pytest.raises(UsageError, match="reads the native layout of its weights"):
        convert_bundle(open_bundle(bundle), "portable", tmp_path / "converted")
    with pytest.raises(UsageError, match="no EAGLE head"):
        edgeinfer.load(bundle, context=64, native=False, speculation="eagle", remember=False)


@pytest.mark.slow
def test_assistants_that_read_the_models_cache_are_refused_by_name(tmp_path: Path) -> None:
    source = made(make_bundle, "eagle3", 4)
    assistant = Path(shutil.copytree(source / "drafter", tmp_path / "assistant"))
    change_config(model_type="gemma4_assistant", architectures=["Gemma4AssistantForCausalLM"])(assistant)
    for checkpoint, config in (
        (source / "target", ExportConfig(drafter=assistant, bits=4, calibration="none")),
        (assistant, ExportConfig(bits=4, calibration="none")),
    ):
        with pytest.raises(UnsupportedArchitectureError, match="Gemma 4's assistant model is not supported") as refused:
            export_checkpoint(checkpoint, tmp_path / "bundle", config)
        assert "\n" not in refused.value.message and refused.value.hint
        assert not (tmp_path / "bundle").exists()
