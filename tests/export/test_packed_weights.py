"""Checkpoints whose weights are packed: read as transformers reads them, and damaged ones refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from edgeinfer.bundle.layouts import NATIVE, Layout
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.core.errors import CheckpointError, UnsupportedArchitectureError, UsageError
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.backends.contract import Pass
from edgeinfer.runtime.backends.onnx.backend import OnnxBackend
from edgeinfer.runtime.backends.onnx.paged_backend import PagedBackend
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from tests.alone import Alone
from tests.export.packed import make_mxfp4
from tests.export.passes import TOKENS, expected_logits
from tests.factories import make_checkpoint
from tests.kernel import require_kernel
from tests.tables import each_row

EXPERTS = "model.layers.1.mlp.experts"
ROWS = np.arange(len(TOKENS))


def test_mxfp4_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    model = make_mxfp4(tmp_path / "checkpoint")
    bundle = open_bundle(export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", ExportConfig(bits=32)))
    found = Alone(ReferenceBackend(bundle, 16), 16).forward(Pass(TOKENS, ROWS, ROWS)).logits
    assert np.abs(found - expected_logits(model, TOKENS)).max() <= 1e-4


@each_row("layout", ["native", "portable"])
def test_mxfp4_is_kept_as_it_is(layout: Layout, tmp_path: Path) -> None:
    require_kernel()
    model = make_mxfp4(tmp_path / "checkpoint")
    config = ExportConfig(bits=4, layout=layout, calibration="none")
    bundle = open_bundle(export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", config))
    experts = model.model.layers[1].mlp.experts
    gate, up = experts.gate_up_proj[3].T[::2], experts.gate_up_proj[3].T[1::2]
    found = bundle.tensor("layers.1.mlp.experts.3.gate_up")
    np.testing.assert_array_equal(found, torch.cat([gate, up]).detach().numpy())
    np.testing.assert_array_equal(bundle.tensor("layers.1.mlp.experts.3.down"), experts.down_proj[3].T.detach().numpy())
    (entry,) = (t for t in bundle.manifest.tensors if t.name == "layers.1.mlp.experts.3.down")
    assert (entry.bits, entry.e2m1) == ((4, True) if layout == NATIVE else (8, False))
    given = Pass(TOKENS, ROWS, ROWS)
    wanted = Alone(ReferenceBackend(bundle, 16), 16).forward(given).logits
    for backend in (Alone(PagedBackend(bundle, 16), 16), Alone(OnnxBackend(bundle, 16), 16)):
        error = np.linalg.norm(backend.forward(given).logits - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
        assert np.median(error) <= 0.06


def make_fp8(folder: Path, whole: bool) -> Any:
    """A random DeepSeek-V3 whose matrices are 8-bit floats with scales, as published; returns what these are.

    Args:
        whole: a matrix has one scale instead of one for each block of 128 x 128.
    """
    model = make_checkpoint(
        folder, "DeepseekV3", hidden_size=160, intermediate_size=288, num_hidden_layers=2, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=136, first_k_dense_replace=1, n_group=1, topk_group=1,
        kv_lora_rank=144, q_lora_rank=40, qk_nope_head_dim=48, qk_rope_head_dim=16, v_head_dim=40,
        num_key_value_heads=4,
    )  # fmt: skip
    file, places = folder / "model.safetensors", dict(model.named_parameters())
    tensors, config = load_file(file), json.loads((folder / "config.json").read_text())
    for name, values in list(tensors.items()):
        if values.ndim != 2 or "_proj" not in name:
            continue
        rows, columns = ((size + 127) // 128 for size in values.shape)
        scales = torch.full((), 0.004) if whole else 0.002 + 0.004 * torch.rand(rows, columns)
        wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1) if scales.ndim else scales.expand_as(values)
        wide = wide[: values.shape[0], : values.shape[1]]
        tensors[name] = (values / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
        if whole:
            tensors[f"{name.removesuffix('weight')}activation_scale"] = torch.tensor(1.0)
        read = tensors[name].float() * wide
        if name in places:
            places[name].data = read
        else:
            place, expert, part = (part for part in name.replace(".weight", "").rsplit(".", 2))
            experts = model.get_submodule(place)
            if part == "down_proj":
                experts.down_proj.data[int(expert)] = read
            else:
                half = 0 if part == "gate_proj" else len(read)
                experts.gate_up_proj.data[int(expert), half : half + len(read)] = read
    save_file(tensors, file)
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": None if whole else [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    return model


@each_row("whole", [False, True])
def test_fp8_is_read_with_its_scales(whole: bool, tmp_path: Path) -> None:
    model = make_fp8(tmp_path / "checkpoint", whole)
    bundle = open_bundle(export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", ExportConfig(bits=32)))
    found = Alone(ReferenceBackend(bundle, 16), 16).forward(Pass(TOKENS, ROWS, ROWS)).logits
    assert np.abs(found - expected_logits(model, TOKENS)).max() <= 1e-4


def test_fp8_of_other_blocks_is_refused(tmp_path: Path) -> None:
    make_fp8(tmp_path / "checkpoint", False)
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [64, 64]
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedArchitectureError, match=r"blocks of \[64, 64\]"):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", ExportConfig(bits=4, calibration="none"))


def make_bitnet(folder: Path, kind: str) -> Any:
    """A random BitNet of ternary matrices, stored as `kind`; returns the model of them, with float activations."""
    model = make_checkpoint(folder, "BitNet")
    file = folder / "model.safetensors"
    tensors, config = load_file(file), json.loads((folder / "config.json").read_text())
    for name, module in model.model.layers.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        name = f"model.layers.{name}.weight"
        scale = module.weight.detach().abs().mean()
        if kind == "offline":
            scale = scale.bfloat16().float()
        ternary = (module.weight.detach() / scale).round().clamp(-1, 1)
        module.weight.data = ternary * scale
        if kind != "online":
            # As transformers' pack_weights, whose module compiles functions when it is imported.
            quarters = ternary.add(1).byte().chunk(4)
            tensors[name] = quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6
            tensors[f"{name}_scale"] = (1 / scale if kind == "bitlinear" else scale).reshape(1)
    save_file(tensors, file)
    classes = {"linear_class": "bitlinear" if kind == "bitlinear" else "autobitlinear"}
    mode = {"quantization_mode": "online" if kind == "online" else "offline"}
    config["quantization_config"] = {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"], **classes, **mode}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def round_activations(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Rounds what enters a product as transformers' BitLinear does: to int8, by the largest of each token."""
    scale = 127 / given[0].abs().amax(dim=-1, keepdim=True).clamp(min=1e-5)
    return ((given[0] * scale).round().clamp(-128, 127) / scale, *given[1:])


@each_row("kind", ["offline", "online", "bitlinear"])
def test_ternary_weights_are_read_and_kept_as_they_are(kind: str, tmp_path: Path) -> None:
    require_kernel()
    model = make_bitnet(tmp_path / "checkpoint", kind)
    expected = expected_logits(model, TOKENS)
    floats = open_bundle(export_checkpoint(tmp_path / "checkpoint", tmp_path / "floats", ExportConfig(bits=32)))
    given = Pass(TOKENS, ROWS, ROWS)
    assert np.abs(Alone(ReferenceBackend(floats, 16), 16).forward(given).logits - expected).max() <= 1e-4
    bundle = open_bundle(
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", ExportConfig(bits=4, calibration="none"))
    )
    attention, mlp = model.model.layers[2].self_attn, model.model.layers[2].mlp
    for name, modules in {
        "attn.qkv": (attention.q_proj, attention.k_proj, attention.v_proj),
        "attn.out": (attention.o_proj,),
        "mlp.gate_up": (mlp.gate_proj, mlp.up_proj),
        "mlp.down": (mlp.down_proj,),
    }.items():
        (entry,) = (t for t in bundle.manifest.tensors if t.name == f"layers.2.{name}")
        assert (entry.bits, entry.zero_points) == (2, None)
        wanted = torch.cat([module.weight for module in modules]).detach()
        found = torch.from_numpy(bundle.tensor(entry.name))
        # Scales that no bfloat16 is are rounded.
        assert torch.equal(found, wanted) if kind == "offline" else torch.allclose(found, wanted, rtol=2**-8)
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(round_activations)
    theirs, ours = expected_logits(model, TOKENS), Alone(PagedBackend(bundle, 16), 16).forward(given).logits
    error = np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
    assert np.median(error) <= 0.06, error


def test_weights_that_are_kept_are_not_rounded_for_a_text(tmp_path: Path) -> None:
    make_bitnet(tmp_path / "checkpoint", "offline")
    (tmp_path / "text.txt").write_text("Once upon a time there was a little dog. The dog had a red ball.\n" * 8)
    config = ExportConfig(bits=8, bits_for=(("*", 4),), calibration=tmp_path / "text.txt", calibration_tokens=96)
    with pytest.raises(UsageError, match="packed weights"):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", config)


FP8 = "model.layers.0.mlp.gate_proj.weight_scale_inv"
TERNARY = "model.layers.1.self_attn.q_proj.weight"
UINT8 = torch.uint8


@pytest.mark.parametrize(
    ("kind", "name", "spoilt", "says"),
    [
        ("mxfp4", f"{EXPERTS}.down_proj_scales", torch.full((4, 64, 3), 255, dtype=UINT8), "scales beyond"),
        ("mxfp4", f"{EXPERTS}.down_proj_scales", torch.full((4, 64, 3), 253, dtype=UINT8), "scales beyond"),
        ("mxfp4", f"{EXPERTS}.down_proj_scales", None, "no tensor '.*down_proj_scales'"),
        (
            "mxfp4",
            f"{EXPERTS}.gate_up_proj_blocks",
            torch.zeros((4, 192, 2, 8), dtype=UINT8),
            r"shape \(4, 192, 2, 8\)",
        ),
        ("mxfp4", f"{EXPERTS}.gate_up_proj_scales", torch.zeros((4, 192, 2)), "type F32"),
        ("fp8", FP8, torch.ones((2, 1)), r"has shape \(2, 1\)"),
        ("fp8", FP8, None, "type F8_E4M3"),
        ("fp8", FP8, torch.full((3, 2), torch.nan), "not finite"),
        ("ternary", TERNARY, torch.full((16, 64), 255, dtype=UINT8), "not ternary"),
        ("ternary", TERNARY, torch.zeros((64, 64)), r"shape \(64, 64\)"),
        ("ternary", f"{TERNARY}_scale", torch.tensor([-1.0]), "a scale of -1"),
        ("ternary", f"{TERNARY}_scale", None, "no tensor '.*weight_scale'"),
    ],
)
def test_damage_is_refused(kind: str, name: str, spoilt: torch.Tensor | None, says: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    if kind == "mxfp4":
        make_mxfp4(folder)
    elif kind == "fp8":
        make_fp8(folder, whole=False)
    else:
        make_bitnet(folder, "offline")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name)
    save_file(tensors if spoilt is None else tensors | {name: spoilt}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=says) as caught:
        export_checkpoint(folder, tmp_path / "bundle", ExportConfig(bits=4, calibration="none"))
    assert "\n" not in caught.value.message
    assert not (tmp_path / "bundle").exists()
