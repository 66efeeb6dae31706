"""Bundles of architectures without a builder by Hugging Face Optimum's ONNX export (edgeinfer.bundle.concat_graph)."""

from __future__ import annotations

import contextlib
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from edgeinfer.bundle import concat_graph
from edgeinfer.bundle.geometry import Geometry
from edgeinfer.bundle.layouts import MODEL
from edgeinfer.bundle.manifest import Capabilities, Manifest
from edgeinfer.bundle.writing import seal, write_bundle
from edgeinfer.core.errors import CheckpointError, UnsupportedArchitectureError, UsageError
from edgeinfer.core.results import Progress
from edgeinfer.export.options import ExportConfig
from edgeinfer.export.source.checkpoint import Checkpoint
from edgeinfer.export.source.hf_config import read_config
from edgeinfer.export.source.sidecar import read_sidecar
from edgeinfer.quant.methods import quantize
from edgeinfer.quant.policy import QuantPolicy

_CONTRIB = "com.microsoft"
# int8 activations: the fast path of MatMulNBits on every CPU.
_ACCURACY_LEVEL = 4
# Constants below this size stay in the graph, where ONNX Runtime folds them.
_EXTERNAL_BYTES = 1024
_TASK = "text-generation-with-past"
_INSTALL = "pip install 'edgeinfer[optimum]'"
_ELSEWHERE = "Choose a model of a family that edgeinfer or optimum-onnx supports."
# What families call their longest context; models with ALiBi or recurrence have no table of positions.
_LENGTHS = ("max_position_embeddings", "seq_length", "max_seq_len", "n_positions")
_STEPS = 3
# Whole and continued passes differ by float32 rounding, thousands of times smaller than this share of the logits.
_SAME = 1e-3
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


def quantize_graph(model: onnx.ModelProto, policy: QuantPolicy, vocab_size: int) -> None:
    """Replaces MatMul and Gemm with a constant matrix by MatMulNBits; one with `vocab_size` outputs is the head."""
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    # Transposed matrices and their sources: a tied head reads the embedding that way.
    turned = {n.output[0]: n.input[0] for n in graph.node if n.op_type == "Transpose" and _value(n, "perm") == [1, 0]}
    stored: dict[str, dict[str, NDArray[Any]]] = {}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        found = _constant_matrix(node, constants, turned)
        if found is None:
            nodes.append(node)
            continue
        name, (n, k), by_rows = found
        scheme = policy.scheme("head" if n == vocab_size else node.name, (n, k))
        if scheme is None:
            nodes.append(node)
            continue
        key = f"{name}.rows" if by_rows else f"{name}.columns"
        if key not in stored:
            values: Floats = numpy_helper.to_array(constants[name])
            matrix = quantize(values if by_rows else np.ascontiguousarray(values.T), scheme)
            parts: dict[str, NDArray[Any] | None] = {"data": matrix.data, "scales": matrix.scales}
            parts["zero_points"] = matrix.zero_points
            stored[key] = {f"{key}.{part}": array for part, array in parts.items() if array is not None}
        bias = [each for each in node.input[2:] if each]
        product = f"{node.output[0]}.product" if bias else node.output[0]
        attributes: dict[str, Any] = {"K": k, "N": n, "bits": scheme.bits, "block_size": scheme.block_size}
        attributes["accuracy_level"] = _ACCURACY_LEVEL
        inputs = [node.input[0], *stored[key]]
        nodes.append(helper.make_node("MatMulNBits", inputs, [product], name=node.name, domain=_CONTRIB, **attributes))
        if bias:
            nodes.append(helper.make_node("Add", [product, *bias], [node.output[0]]))
    used = {name for node in nodes for name in node.input} | {output.name for output in graph.output}
    nodes = [node for node in nodes if node.op_type != "Transpose" or used.intersection(node.output)]
    used = {name for node in nodes for name in node.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    kept += [numpy_helper.from_array(array, part) for parts in stored.values() for part, array in parts.items()]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(kept)
    if all(opset.domain != _CONTRIB for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(_CONTRIB, 1))


def _constant_matrix(
    node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto], turned: Mapping[str, str]
) -> tuple[str, tuple[int, int], bool] | None:
    """Name of the constant matrix that a product multiplies by, its shape (N, K), and whether it is stored by rows."""
    by_rows = False
    if node.op_type == "Gemm":
        if _value(node, "alpha", 1.0) != 1.0 or _value(node, "beta", 1.0) != 1.0 or _value(node, "transA", 0):
            return None
        by_rows = bool(_value(node, "transB", 0))
    elif node.op_type != "MatMul":
        return None
    name = node.input[1]
    if name in turned and not by_rows:
        name, by_rows = turned[name], True
    tensor = constants.get(name)
    if tensor is None or tensor.data_type != onnx.TensorProto.FLOAT or len(tensor.dims) != 2:
        return None
    n, k = tensor.dims if by_rows else tensor.dims[::-1]
    return name, (n, k), by_rows


def _value(node: onnx.NodeProto, name: str, default: object = None) -> object:
    default = [1, 0] if name == "perm" else default
    return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


def export_optimum(source: Path, out: Path, config: ExportConfig, progress: Progress | None = None) -> Path:
    """Exports through optimum-onnx, from disk only and without running code of the checkpoint."""
    main_export = _main_export()
    report = progress or (lambda *_: None)
    hf_config = read_config(source)
    sidecar = read_sidecar(source, hf_config)
    with Checkpoint(source):
        pass  # Refuses pickled weights, which Optimum would load.
    model_config = _model_config(source)
    with write_bundle(out, replace_existing=config.force) as work:
        sidecar.write(work)
        # Inside the bundle being written, so that it is on the same disk and vanishes with it on failure.
        with tempfile.TemporaryDirectory(dir=work) as folder:
            report("exporting with optimum", 0, _STEPS)
            raw = _export(main_export, source, Path(folder))
            report("checking the graph", 1, _STEPS)
            graph = onnx.load(raw, load_external_data=False)
            geometry = _geometry(graph, model_config)
            floats = (t for t in graph.graph.initializer if t.data_type == onnx.TensorProto.FLOAT)
            parameters = sum(math.prod(tensor.dims) for tensor in floats)
            _check_continues(raw, geometry)
            report("writing weights", 2, _STEPS)
            config = config.with_defaults(parameters, geometry.vocab_size * geometry.hidden_size)
            model = onnx.load(raw)
            quantize_graph(model, config.policy, geometry.vocab_size)
            where, least = concat_graph.WEIGHTS, _EXTERNAL_BYTES
            onnx.save_model(model, work / MODEL, save_as_external_data=True, location=where, size_threshold=least)
        manifest = Manifest(
            name=config.name or source.resolve().name,
            architecture=hf_config.architecture or hf_config.model_type,
            backend="onnx-optimum",
            geometry=geometry,
            parameters=parameters,
            capabilities=Capabilities(layer_skip=False, hidden=False, tree=False, row_multiple=1),
            export=config.options,
        )
        seal(work, manifest)
        report("done", _STEPS, _STEPS)
    return out


def _main_export() -> Callable[..., None]:
    try:
        import accelerate  # noqa: F401 - without it Optimum stores tied weights twice
        from optimum.exporters.onnx import main_export
    except ImportError as error:
        message = f"The optimum exporter cannot be imported: {error}."
        raise UsageError(message, f"Give it an environment of its own and run there: {_INSTALL}") from error
    export: Callable[..., None] = main_export
    return export


def _model_config(source: Path) -> Any:
    """The configuration in transformers, which gives the sizes of all families the same names."""
    from optimum.exporters.tasks import TasksManager
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except ValueError as error:
        raise _unsupported(error) from error
    try:
        tasks = TasksManager.get_supported_tasks_for_model_type(config.model_type, "onnx", library_name="transformers")
    except KeyError:
        tasks = {}
    if _TASK not in tasks:
        message = f"Optimum does not export models of type {config.model_type} for text generation."
        raise UnsupportedArchitectureError(message, _ELSEWHERE)
    return config.get_text_config()


def _export(main_export: Callable[..., None], source: Path, folder: Path) -> Path:
    """Lets Optimum write its float32 graph into `folder`; returns the graph's path."""
    try:
        with _quiet():
            main_export(
                str(source),
                str(folder),
                task=_TASK,
                local_files_only=True,
                trust_remote_code=False,
                do_validation=False,
                library_name="transformers",
            )
    except (ValueError, KeyError, TypeError, NotImplementedError, RuntimeError) as error:
        # Whatever its patches of the model's code and torch's tracer trip over.
        raise _unsupported(error) from error
    if not (folder / MODEL).is_file():
        written = ", ".join(sorted(p.name for p in folder.glob("*.onnx")))
        raise _unsupported(f"it wrote {written or 'no graph'} instead of one decoder")
    return folder / MODEL


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences warnings and logs about the libraries' internals."""
    from optimum.utils import logging as optimum_logging
    from transformers.utils import logging as transformers_logging

    libraries = (optimum_logging, transformers_logging)
    levels = [library.get_verbosity() for library in libraries]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for library in libraries:
            library.set_verbosity_error()
        try:
            yield
        finally:
            for library, level in zip(libraries, levels, strict=True):
                library.set_verbosity(level)


def _unsupported(reason: object) -> UnsupportedArchitectureError:
    first = next(iter(str(reason).strip().splitlines()), "") or type(reason).__name__
    return UnsupportedArchitectureError(f"Optimum cannot export this model: {first.rstrip('.')}.", _ELSEWHERE)


def _geometry(model: onnx.ModelProto, config: Any) -> Geometry:
    """Sizes of cache and vocabulary from the graph, the others from the configuration."""
    values = (*model.graph.input, *model.graph.output)
    # 0 where a dimension varies.
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}
    inputs, outputs = ({value.name for value in side} for side in (model.graph.input, model.graph.output))
    pasts = sorted(name for name in inputs if name.startswith("past_key_values."))
    layers = len(pasts) // 2
    optional = {concat_graph.ATTENTION_MASK, concat_graph.POSITION_IDS}
    wanted = {concat_graph.INPUT_IDS, *concat_graph.past_names(layers)}
    produced = {concat_graph.LOGITS, *concat_graph.present_names(layers)}
    heads = {tuple(shapes[name][i] for i in (1, 3)) for name in pasts if len(shapes[name]) == 4}
    if not layers or inputs - optional != wanted or not produced <= outputs or len(heads) != 1:
        listed = ", ".join(f"{name}{shapes[name]}" for name in sorted(inputs)[:6])
        raise UnsupportedArchitectureError(f"Optimum's graph has an unsupported kind of cache: {listed}.", _ELSEWHERE)
    num_kv_heads, head_dim = heads.pop()
    vocab_size = shapes[concat_graph.LOGITS][-1] or config.vocab_size
    return Geometry(vocab_size, config.hidden_size, layers, num_kv_heads, head_dim, _max_positions(config))


def _max_positions(config: Any) -> int:
    """The longest context; at most a sliding window, because Optimum's caches drop what has left it."""
    longest = next((v for v in (getattr(config, n, None) for n in _LENGTHS) if isinstance(v, int) and v > 0), None)
    if longest is None:
        message = "config.json does not say how long a context the model supports."
        raise CheckpointError(message, 'Add its training length to config.json: "max_position_embeddings": 2048.')
    window = getattr(config, "sliding_window", None)
    return longest if window is None else min(longest, window - 1)


def _check_continues(path: Path, geometry: Geometry) -> None:
    """Checks that a text in two passes gives the same as in one: tracing can freeze a branch or a length."""
    size = min(6, geometry.max_positions)
    tokens = np.arange(1, size + 1) % geometry.vocab_size  # (S,)
    shape = (1, geometry.num_kv_heads, 0, geometry.head_dim)
    empty = [np.zeros(shape, np.float32)] * (2 * geometry.num_layers)
    try:
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        whole, *_ = _run(session, tokens, empty)
        _, *cached = _run(session, tokens[: size // 2], empty)
        rest, *_ = _run(session, tokens[size // 2 :], cached)
    except Exception as error:
        # onnxruntime raises a family of exceptions without a common base of its own.
        raise _unsupported(f"its graph does not run: {error}") from error
    if not np.isfinite(whole).all():
        hint = "The checkpoint is damaged or its training diverged."
        raise CheckpointError("The model's logits are not finite.", hint)
    tolerance = _SAME * float(np.abs(whole).max())
    if not np.allclose(rest, whole[:, size // 2 :], rtol=0, atol=tolerance):
        raise _unsupported("its graph computes something else when it continues from its cache")


def _run(session: ort.InferenceSession, tokens: Ints, past: list[Floats]) -> list[Floats]:
    """Logits (1, S, V), then the grown cache, 2 L of (1, H, P + S, h)."""
    layers, start = len(past) // 2, past[0].shape[2]
    end = start + len(tokens)
    feeds = dict(zip(concat_graph.past_names(layers), past, strict=True)) | {
        concat_graph.INPUT_IDS: tokens[None],
        concat_graph.ATTENTION_MASK: np.ones((1, end), np.int64),
        concat_graph.POSITION_IDS: np.arange(start, end)[None],
    }
    taken = {i.name for i in session.get_inputs()}
    names = [concat_graph.LOGITS, *concat_graph.present_names(layers)]
    outputs: list[Floats] = session.run(names, {name: array for name, array in feeds.items() if name in taken})
    return outputs
