"""Adapters in PEFT's layout give PEFT's logits, rows of several share passes bit for bit, and others are refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeinfer.bundle.array_file import encode_arrays
from edgeinfer.core.errors import AdapterError
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.backends.contract import Pass
from edgeinfer.runtime.backends.onnx.adapters import pack_adapters
from edgeinfer.runtime.backends.onnx.paged_backend import PagedBackend
from tests.alone import Alone
from tests.cache import made
from tests.kernel import require_kernel
from tests.runtime.models import bundle_of, checkpoint_of

# PEFT asks transformers in a way that its version 5 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

TOKENS = np.array([3, 17, 250, 9, 9, 120, 77, 31, 5, 200, 41, 8])
FLOATS, LOW = ExportConfig(32), ExportConfig(4, 32, keep_small=False, calibration="none")
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PLAIN: dict[str, Any] = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"]}
WIDE: dict[str, Any] = {"r": 19, "lora_alpha": 8, "use_rslora": True, "target_modules": ALL}
MIXED: dict[str, Any] = {
    **{"r": 3, "lora_alpha": 5, "target_modules": [*ALL, "lm_head"], "layers_to_transform": [1]},
    **{"rank_pattern": {"down_proj": 8}, "alpha_pattern": {"self_attn.q_proj": 2}},
}
# A delta rule between attention whose query heads have gates behind them: rows of q_proj are of two matrices.
HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "head_dim": 32},
    **{"linear_value_head_dim": 24, "tie_word_embeddings": True},
}
SHAPES: dict[str, dict[str, Any]] = {"Qwen3_5": HYBRID, "Qwen3Next": HYBRID}
DELTA = {**PLAIN, "target_modules": [*ALL, "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"]}
JOINED = {**PLAIN, "target_modules": ["q_proj", "k_proj", "v_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"]}


def adapter_of(variant: str, settings: Mapping[str, Any], seed: int = 0) -> Path:
    """An adapter of a variant's checkpoint that PEFT made, with random factors."""
    return made(_adapter, variant, sorted(settings.items()), seed) / "adapter"


def _adapter(folder: Path, variant: str, settings: list[tuple[str, Any]], seed: int) -> None:
    torch, peft, model = _model(variant)
    torch.manual_seed(seed)
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **dict(settings))
    adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(folder / "adapter", save_embedding_layers=False)


def _model(variant: str) -> tuple[Any, Any, Any]:
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    return torch, peft, AutoModelForCausalLM.from_pretrained(_checkpoint(variant), dtype=torch.float32)


def _checkpoint(variant: str) -> Path:
    return checkpoint_of(variant, **SHAPES.get(variant, {}))


def peft_logits(variant: str, adapter: Path) -> NDArray[np.float32]:  # (S, V)
    torch, peft, model = _model(variant)
    adapted = peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        logits: NDArray[np.float32] = adapted(torch.tensor(TOKENS)[None]).logits[0].numpy()
    return logits


def backend_with(variant: str, config: ExportConfig, *adapters: Path) -> Alone[PagedBackend]:
    require_kernel()
    bundle = bundle_of(variant, config, **SHAPES.get(variant, {}))
    packed = pack_adapters(bundle.manifest, {f"a{i}": str(path) for i, path in enumerate(adapters)})
    return Alone(PagedBackend(bundle, 64, adapters=packed, threads=2), 64)


def chain(tokens: NDArray[np.int64], start: int = 0) -> Pass:
    size = len(tokens)
    return Pass(tokens, np.arange(start, start + size), np.arange(size))


def logits_of(backend: Alone[PagedBackend], name: str | None) -> NDArray[np.float32]:
    backend.cache.clear()
    backend.use_adapter(name)
    return backend.forward(chain(TOKENS)).logits.copy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("llama", WIDE),
        ("llama", MIXED),
        ("Phi3", {**PLAIN, "target_modules": ["qkv_proj", "gate_up_proj"]}),
        ("Qwen3_5", DELTA),
        ("Qwen3Next", JOINED),
    ],
)
def test_logits_equal_pefts(variant: str, settings: dict[str, Any]) -> None:
    adapter = adapter_of(variant, settings)
    backend = backend_with(variant, FLOATS, adapter)
    ours, plain, theirs = logits_of(backend, "a0"), logits_of(backend, None), peft_logits(variant, adapter)
    assert np.abs(ours - theirs).max() <= 1e-4
    assert np.abs(ours - plain).max() > 0.1


@pytest.mark.parametrize(
    ("variant", "settings"), [("llama", WIDE), pytest.param("Qwen3_5", DELTA, marks=pytest.mark.slow)]
)
def test_rows_of_several_adapters_share_passes_bit_for_bit(variant: str, settings: dict[str, Any]) -> None:
    backend = backend_with(variant, LOW, adapter_of(variant, settings), adapter_of(variant, PLAIN, seed=1))
    alone = {name: logits_of(backend, name) for name in ("a0", "a1", None)}
    backend.cache.clear()
    sequences = []
    for name in alone:
        cache = backend.new_sequence(32)
        cache.adapter = name
        sequences.append((cache, name))
    found: dict[str | None, list[NDArray[np.float32]]] = {name: [] for name in alone}
    # Three rows of one with one, two and three of the others, in pieces of different sizes.
    for start, stop in ((0, 3), (3, 4), (4, 9), (9, len(TOKENS))):
        outputs = backend.forward_together([(cache, chain(TOKENS[start:stop], start)) for cache, _ in sequences])
        for (_, name), output in zip(sequences, outputs, strict=True):
            found[name].append(output.logits.copy())
    for name, rows in found.items():
        assert np.concatenate(rows).tobytes() == alone[name].tobytes(), name
    assert len({logits.tobytes() for logits in alone.values()}) == 3
    plain = backend_with(variant, LOW, adapter_of(variant, PLAIN, seed=1))
    assert logits_of(plain, "a0").tobytes() == alone["a1"].tobytes()


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def _cut(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


REFUSED: list[tuple[Callable[[Path], object], str]] = [
    (_config(use_dora=True), "DoRA"),
    (_config(modules_to_save=["lm_head"]), "modules_to_save"),
    (_config(bias="all"), "bias='all'"),
    (_config(peft_type="IA3"), "IA3"),
    (_config(r=5), "not of rank 5"),
    (_config(lora_alpha="much"), "lora_alpha"),
    (_config(init_lora_weights="pissa"), "pissa"),
    (_config(rank_pattern={"(": 4}), "no pattern"),
    (lambda folder: (folder / "adapter_model.safetensors").replace(folder / "adapter_model.bin"), "pickled"),
    (_cut, "truncated"),
    (lambda folder: (folder / "adapter_config.json").unlink(), "no adapter_config.json"),
    (lambda folder: (folder / "adapter_model.safetensors").unlink(), "no adapter_model.safetensors"),
]


def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    manifest = bundle_of("llama", LOW).manifest
    for number, (change, message) in enumerate(REFUSED):
        folder = tmp_path / str(number)
        shutil.copytree(adapter_of("llama", PLAIN), folder)
        change(folder)
        with pytest.raises(AdapterError, match=message) as caught:
            pack_adapters(manifest, {"a": str(folder)})
        assert caught.value.hint


def test_adapters_of_experts_are_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["gate_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    name = "base_model.model.model.layers.1.mlp.experts.3.gate_proj.lora_"
    factors = {f"{name}A.weight": np.ones((2, 64), np.float32), f"{name}B.weight": np.ones((32, 2), np.float32)}
    (folder / "adapter_model.safetensors").write_bytes(encode_arrays(factors, {}))
    with pytest.raises(AdapterError, match=r"mlp\.experts\.3\.gate_proj, and adapters of experts are not supported"):
        pack_adapters(bundle_of("qwen3-moe", LOW).manifest, {"a": str(folder)})


def test_adapters_of_another_model_are_refused() -> None:
    plain = str(adapter_of("llama", PLAIN))
    wider = bundle_of("llama", LOW, hidden_size=128)
    with pytest.raises(AdapterError, match="q_proj has 64 inputs"):
        pack_adapters(wider.manifest, {"a": plain})
    with pytest.raises(AdapterError, match=r"changes model\.layers\.0\.self_attn\.q_proj, which is no linear module"):
        pack_adapters(bundle_of("Phi3", LOW).manifest, {"a": plain})
    old = dataclasses.replace(
        wider.manifest, tensors=tuple(dataclasses.replace(t, modules=()) for t in wider.manifest.tensors)
    )
    with pytest.raises(AdapterError, match="does not say which modules"):
        pack_adapters(old, {"a": plain})
