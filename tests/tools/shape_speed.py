"""Passes of decoders at published shapes, random weights, beside llama.cpp on the same: times, their ratios and memory.

    python -m tests.tools.shape_speed FOLDER [SHAPE ...]

Of each shape a random checkpoint, a bundle of 4 bits and a Q4_0 file are made in FOLDER, unless they are there. Then
processes of both engines, with one thread, take turns; each takes in a prompt of 512 tokens, and then repeats passes of
one row and of four, every row with logits. A row of the table has medians over processes of their medians.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.apps.bench.model_files import write_q4_0
from edgeinfer.apps.bench.render import markdown_table
from edgeinfer.apps.bench.synthetic import STANDARD_DEVIATION, encode, write_tokenizer
from edgeinfer.bundle.array_file import encode_header
from edgeinfer.bundle.gguf.library import llama_library
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.export.architectures import find_architecture
from edgeinfer.export.architectures.described import stored_tensors
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from edgeinfer.export.source.hf_config import HFConfig
from edgeinfer.runtime.backends.contract import ForwardInput
from edgeinfer.runtime.backends.onnx.paged_backend import PagedBackend

PROMPT, CONTEXT, ROUNDS, PROCESSES = 512, 1024, 24, 3
GROUP = 128
_SLAB = 1 << 22

_QWEN = ["linear_attention"] * 3 + ["full_attention"]
_LFM_ATTENDING = (2, 5, 8, 10, 12, 14)
_GRANITE_ATTENDING = (5, 15, 25, 35)
_YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "truncate": False}
# Sizes from the config.json files of Qwen/Qwen3.5-0.8B, google/gemma-3-1b-it, LiquidAI/LFM2-1.2B, openai/gpt-oss-20b
# (of 24 layers 4) and ibm-granite/granite-4.0-h-1b.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **{"vocab_size": 248320, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24},
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "layer_types": _QWEN * 6},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128},
        **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
    "gemma-3-1b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **{"vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26},
        **{"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512},
        **{"sliding_window_pattern": 6, "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh"},
        **{"rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256},
    },
    "lfm2-1.2b": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        **{"vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 12288, "num_hidden_layers": 16},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "conv_L_cache": 3, "norm_eps": 1e-5},
        **{"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256},
        "layer_types": ["full_attention" if layer in _LFM_ATTENDING else "conv" for layer in range(16)],
        "rope_theta": 1e6,
    },
    "gpt-oss-20b-4": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        **{"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 4},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32},
        **{"num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True, "rms_norm_eps": 1e-5},
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {**_YARN, "original_max_position_embeddings": 4096},
        "tie_word_embeddings": False,
    },
    "granite-4-h-1b": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        **{"vocab_size": 100352, "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 40},
        **{"num_attention_heads": 12, "num_key_value_heads": 4, "shared_intermediate_size": 4096},
        **{"num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 48, "mamba_d_head": 64},
        **{"mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True},
        "layer_types": ["attention" if layer in _GRANITE_ATTENDING else "mamba" for layer in range(40)],
        **{"embedding_multiplier": 12, "residual_multiplier": 0.22, "attention_multiplier": 0.0078125},
        **{"logits_scaling": 6, "position_embedding_type": "nope", "rms_norm_eps": 1e-5},
    },
}


class _Packed:
    """Names of a checkpoint's tensors that are not written yet: whatever can be packed is."""

    def __contains__(self, name: str) -> bool:
        return name.endswith("_blocks")


def _tensors(config: HFConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of every tensor that a conversion reads."""
    family, packed = find_architecture(config), config.model_type == "gpt_oss"
    spec = family.read(config, config.flag("tie_word_embeddings"))
    stored: Any = _Packed() if packed else ()
    found = (
        each
        for plan in family.tensors(config, spec, stored)
        for source in plan.sources
        for each in stored_tensors(source)
    )
    return {name: ("U8" if types == ("U8",) else "BF16", shape) for name, shape, types in found}


def write_checkpoint(folder: Path, values: dict[str, Any]) -> None:
    """Writes a checkpoint of random weights, slab by slab."""
    config = {"max_position_embeddings": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", **values}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder / "tokenizer.json", 1024)
    tensors, chance = _tensors(HFConfig(config)), np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(encode_header(tensors, {"format": "pt"}))
        for name, (dtype, shape) in tensors.items():
            size = int(np.prod(shape))
            for start in range(0, size, _SLAB):
                file.write(_slab(chance, name, dtype, min(_SLAB, size - start)))


def _slab(chance: np.random.Generator, name: str, dtype: str, count: int) -> bytes:
    if dtype == "U8":
        low, high = (118, 122) if name.endswith("scales") else (0, 256)
        return chance.integers(low, high, count, np.uint8).tobytes()
    if name.endswith("norm.weight") or name.endswith(".D"):
        values = np.ones(count, np.float32)
    elif name.endswith("A_log"):
        values = np.log(np.linspace(1, 16, count, dtype=np.float32))
    else:
        values = chance.standard_normal(count, np.float32)
        values *= np.float32(STANDARD_DEVIATION)
    return encode(values, "bfloat16").tobytes()


def _export(checkpoint: Path, bundle: Path) -> None:
    """Exports, and writes what that took beside the bundle."""
    started = time.process_time()
    export_checkpoint(checkpoint, bundle, ExportConfig(bits=4, group_size=GROUP))
    loaded = [name for name in ("torch", "transformers") if name in sys.modules]
    facts = {"seconds": time.process_time() - started, "mb": _peak_mb(), "loaded": loaded}
    bundle.with_name(f"{bundle.name}.json").write_text(json.dumps(facts))


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# Evaluates some tokens behind those before.
_Evaluate = Callable[[list[int]], None]


def _edgeinfer(bundle: Path) -> _Evaluate:
    backend = PagedBackend(open_bundle(bundle), CONTEXT)

    def evaluate(tokens: list[int]) -> None:
        start, size = backend.cache.length, len(tokens)
        # Of a prompt the last row alone has logits, as in llama.cpp.
        rows = np.arange(size) if size <= 4 else np.array([size - 1])
        backend.forward(ForwardInput(np.array(tokens), np.arange(start, start + size), rows))

    return evaluate


def _llama_cpp(file: Path) -> _Evaluate:
    lib = llama_library()
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    model = lib.llama_model_load_from_file(str(file).encode(), params)
    options = lib.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = CONTEXT, PROMPT, PROMPT
    options.n_threads = options.n_threads_batch = 1
    context, batch, length = lib.llama_init_from_model(model, options), lib.llama_batch_init(PROMPT, 0, 1), 0

    def evaluate(tokens: list[int]) -> None:
        nonlocal length
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, length + index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            batch.logits[index] = len(tokens) <= 4 or index == len(tokens) - 1
        if lib.llama_decode(context, batch) != 0:
            raise SystemExit(f"llama.cpp cannot evaluate {file}.")
        lib.llama_get_logits(context)
        length += len(tokens)

    return evaluate


_ENGINES = {"edgeinfer": _edgeinfer, "llama.cpp": _llama_cpp}


def _measure(engine: str, path: Path) -> dict[str, float]:
    """What one process takes, in milliseconds and MB."""
    evaluate, chance = _ENGINES[engine](path), np.random.default_rng(1)
    # Some of one cluster, so that experts are chosen as unevenly as the router's weights make it.
    tokens = chance.integers(0, 1000, PROMPT + 5 * (ROUNDS + 2)).tolist()
    evaluate(tokens[:16])
    times: dict[str, list[float]] = {"1": [], "4": []}
    started = time.perf_counter()
    evaluate(tokens[16 : PROMPT - 16])
    prompt = (PROMPT - 32) / (time.perf_counter() - started)
    place = PROMPT
    for _ in range(ROUNDS + 2):
        for size in (1, 4):
            started = time.perf_counter()
            evaluate(tokens[place : place + size])
            times[str(size)].append(1e3 * (time.perf_counter() - started))
            place += size
    one, four = (statistics.median(values[2:]) for values in times.values())
    return {"one": one, "four": four, "prompt": prompt, "mb": _peak_mb()}


def _child(*arguments: str) -> str:
    command = [sys.executable, "-m", "tests.tools.shape_speed", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _make(folder: Path, shape: str) -> dict[str, Path]:
    """The models of a shape for each engine."""
    checkpoint, bundle, file = (folder / f"{shape}{suffix}" for suffix in ("", "-b4", ".gguf"))
    if not checkpoint.is_dir():
        write_checkpoint(checkpoint, SHAPES[shape])
    if not bundle.is_dir():
        _child("--export", str(checkpoint), str(bundle))
    if not file.is_file():
        write_q4_0(checkpoint, file)
    return {"edgeinfer": bundle, "llama.cpp": file}


def _rows(folder: Path, shape: str) -> Iterator[tuple[str, ...]]:
    models = _make(folder, shape)
    taken: dict[str, list[dict[str, float]]] = {engine: [] for engine in models}
    for _ in range(PROCESSES):
        for engine, path in models.items():
            taken[engine].append(json.loads(_child("--measure", engine, str(path))))
    for engine, runs in taken.items():
        found = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        growth = statistics.median(run["four"] / run["one"] for run in runs)
        figures = (f"{found['one']:.1f}", f"{growth:.2f}", f"{found['prompt']:.0f}", f"{found['mb']:.0f}")
        faster = ""
        if engine == "edgeinfer":
            ratios = [theirs["one"] / ours["one"] for ours, theirs in zip(runs, taken["llama.cpp"], strict=True)]
            faster = f"{statistics.median(ratios):.2f}"
        yield (shape, engine, *figures, faster)


def main() -> None:
    """Makes and measures the shapes, or does what a child process is for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--export", action="store_true", help="export the first path to the second")
    parser.add_argument("--measure", choices=_ENGINES, help="measure the model at the path")
    parser.add_argument("--make", action="store_true", help="make the models of the shapes and measure nothing")
    given = parser.parse_args()
    if given.export:
        _export(*map(Path, given.paths))
        return
    if given.measure:
        print(json.dumps(_measure(given.measure, Path(given.paths[0]))))
        return
    folder, *shapes = given.paths
    for shape in shapes or SHAPES:
        _make(Path(folder), shape)
    if not given.make:
        rows = [row for shape in shapes or SHAPES for row in _rows(Path(folder), shape)]
        header = ("shape", "engine", "one row, ms", "c(4)/c(1)", "prompt, tokens/s", "peak RSS, MB", "times faster")
        print(markdown_table(header, rows, left=(0, 1)))


if __name__ == "__main__":
    main()
