"""Models without a builder: exported by optimum-onnx, their linear layers quantized, against transformers."""

from __future__ import annotations

import importlib.util
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import transformers
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer

from edgeinfer.apps.cli.main import main
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import CheckpointError, UnsupportedArchitectureError, UsageError
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.optimum_route import quantize_graph
from edgeinfer.export.options import ExportConfig
from edgeinfer.quant.policy import QuantPolicy
from edgeinfer.runtime.backends.contract import Pass
from edgeinfer.runtime.backends.onnx.concat import ConcatBackend
from tests.alone import Alone
from tests.factories import make_tokenizer
from tests.tables import each_row

TOKENS = np.array([0, 17, 300, 5, 5, 42, 99, 123, 7, 250, 31], np.int64)
TOLERANCE = 1e-4
FLOAT = ExportConfig(bits=32, exporter="optimum")
# Positions that enter as an input, that the graph counts itself, tied and untied heads, grouped heads.
SMALL: dict[str, dict[str, Any]] = {
    "GPT2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128},
    "GPTNeoX": {"intermediate_size": 96, "max_position_embeddings": 128},
    "OPT": {"ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 128},
    "Gemma": {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128},
    "Bloom": {"seq_length": 64},
}
SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
VOCABULARY = {"vocab_size": 320, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}


@pytest.fixture(scope="session")
def optimum() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what optimum and torch say on import is theirs
        reason = "needs an environment with the `optimum` extra"
        pytest.importorskip("accelerate", reason=reason)
        pytest.importorskip("optimum.exporters.onnx", reason=reason, exc_type=ImportError)


def save_random(folder: Path, kind: str, head: str = "ForCausalLM", **settings: Any) -> Any:
    """Saves a random checkpoint of transformers' class `kind`, every parameter wide enough to move the logits."""
    name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}{head}"
    config = getattr(transformers, f"{kind}Config")(**(SIZES | VOCABULARY | SMALL.get(kind, {}) | settings))
    config.architectures = [name]
    with torch.random.fork_rng():
        # What the class itself draws is the same too, whichever tests ran before.
        torch.manual_seed(0)
        model = getattr(transformers, name)(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.12 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return model


@dataclass(frozen=True)
class Exported:
    """A random model and its bundle."""

    model: Any
    bundle: Bundle

    def logits(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:  # (S, V)
        with torch.no_grad():
            logits: NDArray[np.float32] = self.model(torch.from_numpy(tokens)[None]).logits[0].numpy()
        return logits


@pytest.fixture(scope="module", params=list(SMALL))
def exported(request: pytest.FixtureRequest, optimum: None, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp(request.param)
    model = save_random(folder / "checkpoint", request.param)
    return Exported(model, open_bundle(export_checkpoint(folder / "checkpoint", folder / "bundle", FLOAT)))


def feed(backend: Alone[ConcatBackend], tokens: NDArray[np.int64], rows: list[int]) -> NDArray[np.float32]:  # (R, V)
    positions = np.arange(backend.cache.length, backend.cache.length + len(tokens))
    return backend.forward(Pass(tokens, positions, np.array(rows, np.int64))).logits.copy()


@pytest.mark.optimum
def test_manifest(exported: Exported) -> None:
    manifest, config = exported.bundle.manifest, exported.model.config
    assert manifest.backend == "onnx-optimum"
    assert manifest.architecture == config.architectures[0]
    assert manifest.decoder is None
    assert manifest.tensors == ()
    assert not (manifest.capabilities.tree or manifest.capabilities.layer_skip or manifest.capabilities.hidden)
    assert manifest.parameters == pytest.approx(sum(p.numel() for p in exported.model.parameters()), rel=0.01)
    assert manifest.weight_bytes >= 4 * manifest.parameters
    geometry = manifest.geometry
    assert (geometry.vocab_size, geometry.hidden_size, geometry.num_layers) == (320, 64, 3)
    assert geometry.max_positions == (64 if config.model_type == "bloom" else 128)
    exported.bundle.verify()
    assert {"tokenizer.json", "generation_config.json", "model.onnx", "model.onnx_data"} <= set(manifest.files)


@pytest.mark.optimum
@pytest.mark.parametrize("sizes", [[11], [1] * 11, [4, 1, 6], [10, 1]])
def test_logits_match_transformers(exported: Exported, sizes: list[int]) -> None:
    expected, backend, start = exported.logits(TOKENS), Alone(ConcatBackend(exported.bundle, 16), 16), 0
    for size in sizes:
        got = feed(backend, TOKENS[start : start + size], list(range(size)))
        assert np.abs(got - expected[start : start + size]).max() <= TOLERANCE
        start += size


@pytest.mark.optimum
def test_logits_match_after_rolling_back(exported: Exported) -> None:
    expected, backend = exported.logits(TOKENS), Alone(ConcatBackend(exported.bundle, 16), 16)
    feed(backend, TOKENS[:5], [])
    feed(backend, np.array([9, 8, 7, 6]), [3])
    backend.cache.trim(7)
    backend.cache.trim(5)
    got = feed(backend, TOKENS[5:], [0, 5])
    assert np.abs(got - expected[[5, 10]]).max() <= TOLERANCE


@pytest.mark.optimum
def test_sliding_window_bounds_the_context(optimum: None, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "sliding_window": 9,
        "intermediate_size": 96,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    model = save_random(tmp_path / "checkpoint", "Mistral", **settings)
    bundle = open_bundle(export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", FLOAT))
    assert bundle.manifest.geometry.max_positions == 8
    backend, expected = Alone(ConcatBackend(bundle, 8), 8), Exported(model, bundle).logits(TOKENS[:8])
    feed(backend, TOKENS[:5], [])
    assert np.abs(feed(backend, TOKENS[5:8], [0, 1, 2]) - expected[5:]).max() <= TOLERANCE


@pytest.mark.optimum
def test_export_and_run_from_the_command_line(
    optimum: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_random(tmp_path / "checkpoint", "GPT2")
    out = str(tmp_path / "bundle")
    assert main(["export", str(tmp_path / "checkpoint"), out, "--exporter", "optimum", "--bits", "32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bundle"] == out
    assert main(["inspect", out, "--verify"]) == 0
    assert "GPT2LMHeadModel" in capsys.readouterr().out
    assert main(["run", "-m", out, "-p", "hi there", "-n", "5", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["model"]["backend"] == "onnx-optimum"
    prompt = Tokenizer.from_file(f"{out}/tokenizer.json").encode("hi there").ids
    wanted = list(prompt)
    for _ in range(5):
        wanted.append(int(Exported(model, open_bundle(out)).logits(np.array(wanted))[-1].argmax()))
    assert result["token_ids"] == wanted[len(prompt) :]


@pytest.mark.optimum
@pytest.mark.parametrize(("kind", "head"), [("Bert", "ForMaskedLM"), ("Mamba", "ForCausalLM")])
def test_unsupported_models_are_refused(optimum: None, tmp_path: Path, kind: str, head: str) -> None:
    save_random(tmp_path / "checkpoint", kind, head)
    with pytest.raises(UnsupportedArchitectureError, match=kind.lower()):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", FLOAT)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.optimum
def test_code_of_a_checkpoint_is_never_run(optimum: None, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    save_random(folder, "GPT2")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config |= {"model_type": "custom", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')", "utf-8")
    with pytest.raises(UnsupportedArchitectureError, match="custom code"):
        export_checkpoint(folder, tmp_path / "bundle", FLOAT)
    assert not (tmp_path / "ran").exists()


@pytest.mark.optimum
def test_pickles_and_missing_lengths_are_refused(optimum: None, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    save_random(folder, "Bloom")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    del config["seq_length"]
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(CheckpointError, match="max_position_embeddings"):
        export_checkpoint(folder, tmp_path / "bundle", FLOAT)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickle"):
        export_checkpoint(folder, tmp_path / "bundle", FLOAT)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint"]


@pytest.mark.optimum
@pytest.mark.parametrize("kind", ["GPT2", "GPTNeoX"])
@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("symmetric", [True, False])
def test_quantized_weights(optimum: None, tmp_path: Path, kind: str, group_size: int, symmetric: bool) -> None:
    model = save_random(tmp_path / "checkpoint", kind)
    errors, sizes = [], []
    for bits in (8, 4, 2):
        config = ExportConfig(
            bits=bits, group_size=group_size, symmetric=symmetric, keep_small=False, exporter="optimum"
        )
        bundle = open_bundle(export_checkpoint(tmp_path / "checkpoint", tmp_path / f"bundle{bits}", config))
        assert bundle.manifest.export["bits"] == bits
        sizes.append(bundle.manifest.files["model.onnx_data"].bytes)
        expected = Exported(model, bundle).logits(TOKENS)
        got = feed(Alone(ConcatBackend(bundle, 16), 16), TOKENS, list(range(len(TOKENS))))
        errors.append(float(np.abs(got - expected).mean() / expected.std()))
    assert errors[0] < 0.02
    assert errors[0] < errors[1] < errors[2] < 1
    assert sizes[0] > sizes[1] > sizes[2]


@pytest.mark.skipif(importlib.util.find_spec("optimum") is not None, reason="optimum is installed here")
def test_missing_optimum_says_how_to_install_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"pip install 'edgeinfer\[optimum\]'"):
        export_checkpoint(tmp_path, tmp_path / "bundle", FLOAT)


def test_native_export_points_to_optimum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_random(tmp_path / "checkpoint", "GPT2")
    assert main(["export", str(tmp_path / "checkpoint"), str(tmp_path / "bundle")]) == 3
    message = capsys.readouterr().err
    assert "GPT2LMHeadModel" in message
    assert "--exporter optimum" in message


K, N, V = 64, 96, 40
RNG = np.random.default_rng(0)
MATRICES = {"down": (K, N), "up": (N, K), "embed": (V, K)}


def policy(bits: int, head_bits: int, *, symmetric: bool = False) -> QuantPolicy:
    return QuantPolicy(bits, head_bits, 32, symmetric, keep_small=False)


def make_model(nodes: list[onnx.NodeProto]) -> onnx.ModelProto:
    weights = [numpy_helper.from_array(RNG.normal(size=s).astype(np.float32), n) for n, s in MATRICES.items()]
    weights.append(numpy_helper.from_array(RNG.normal(size=N).astype(np.float32), "bias"))
    used = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes,
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["R", K])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["R", None])],
        [w for w in weights if w.name in used],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def run(model: onnx.ModelProto, x: NDArray[np.float32]) -> NDArray[np.float32]:
    onnx.checker.check_model(model)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    result: NDArray[np.float32] = session.run(None, {"x": x})[0]
    return result


def gemm(*inputs: str, **attributes: Any) -> list[onnx.NodeProto]:
    return [helper.make_node("Gemm", ["x", *inputs], ["y"], **attributes)]


def tied(**attributes: Any) -> list[onnx.NodeProto]:
    return [
        helper.make_node("Transpose", ["embed"], ["turned"], **attributes),
        helper.make_node("MatMul", ["x", "turned"], ["y"]),
    ]


LINEAR = {
    "matmul": [helper.make_node("MatMul", ["x", "down"], ["y"])],
    "gemm": gemm("down"),
    "gemm-bias": gemm("down", "bias", alpha=1.0, beta=1.0),
    "gemm-transposed": gemm("up", "bias", transB=1),
    "tied-head": tied(perm=[1, 0]),
    "tied-head-default-order": tied(),
}
LEFT = {
    "scaled": gemm("down", "bias", alpha=0.5),
    "no-constant": [helper.make_node("Neg", ["down"], ["w"]), helper.make_node("MatMul", ["x", "w"], ["y"])],
}


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", LINEAR)
def test_linear_layers_are_replaced(kind: str, symmetric: bool) -> None:
    model, x = make_model(LINEAR[kind]), RNG.normal(size=(5, K)).astype(np.float32)
    expected = run(model, x)
    quantize_graph(model, policy(8, 8, symmetric=symmetric), V)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds == (["MatMulNBits", "Add"] if "bias" in kind or kind == "gemm-transposed" else ["MatMulNBits"])
    assert not {t.name for t in model.graph.initializer} & set(MATRICES)
    # 8-bit weights and 8-bit activations: about a percent of the spread.
    assert np.abs(run(model, x) - expected).max() < 0.03 * expected.std()


@each_row("kind", LEFT)
def test_what_is_not_a_linear_layer_stays(kind: str) -> None:
    model, x = make_model(LEFT[kind]), RNG.normal(size=(5, K)).astype(np.float32)
    expected, kinds = run(model, x), [node.op_type for node in model.graph.node]
    quantize_graph(model, policy(4, 4), V)
    assert [node.op_type for node in model.graph.node] == kinds
    assert np.array_equal(run(model, x), expected)


def test_float_bits_change_nothing() -> None:
    for nodes in LINEAR.values():
        model, x = make_model(nodes), RNG.normal(size=(5, K)).astype(np.float32)
        expected = run(model, x)
        quantize_graph(model, policy(32, 32), V)
        assert np.array_equal(run(model, x), expected)


def test_the_head_has_its_own_bits_and_the_embedding_stays() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "down"], ["wide"]),
        helper.make_node("MatMul", ["wide", "up"], ["narrow"]),
        helper.make_node("ArgMax", ["narrow"], ["ids"], axis=1, keepdims=0),
        helper.make_node("Mod", ["ids", "forty"], ["tokens"]),
        helper.make_node("Gather", ["embed", "tokens"], ["rows"]),
        helper.make_node("Transpose", ["embed"], ["turned"]),
        helper.make_node("MatMul", ["rows", "turned"], ["y"]),
    ]
    model = make_model(nodes)
    model.graph.initializer.append(numpy_helper.from_array(np.array(V), "forty"))
    quantize_graph(model, policy(4, 8), V)
    bits = [a.i for n in model.graph.node if n.op_type == "MatMulNBits" for a in n.attribute if a.name == "bits"]
    assert bits == [4, 4, 8]
    assert "embed" in {t.name for t in model.graph.initializer}
    run(model, RNG.normal(size=(5, K)).astype(np.float32))


def test_a_matrix_used_twice_is_stored_once() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "down"], ["a"]),
        helper.make_node("MatMul", ["x", "down"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    model = make_model(nodes)
    quantize_graph(model, policy(4, 4), V)
    assert len(model.graph.initializer) == 3
