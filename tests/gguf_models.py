"""GGUF files for tests: the built-in model, whose weights are taken from its bundle, and small random ones."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from edgeinfer.bundle.gguf.library import llama_library
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.writing import MANIFEST
from edgeinfer.core.errors import BackendError
from edgeinfer.export.gguf.quantize import quantize_gguf
from edgeinfer.export.gguf.writer import write_gguf
from tests.cache import made
from tests.factories import make_checkpoint
from tests.speculation import BUILTIN

_WRITTEN = ("F32", "F16", "BF16", "Q8_0")  # by the exporter itself; other types are made by llama.cpp
_TEXTS = ("tokenizer.json", "chat_template.jinja", "generation_config.json")


@functools.cache
def builtin_gguf(kind: str = "F16") -> Path:
    """The built-in model's weights in a GGUF file, made once for all tests."""
    return made(_write_builtin, kind, BUILTIN / MANIFEST) / f"tales-{kind}.gguf"


@functools.cache
def builtin_checkpoint() -> Path:
    """A checkpoint with the built-in model's weights multiplied out, made once for all tests."""
    return made(_write_checkpoint, BUILTIN / MANIFEST) / "tales"


def random_gguf(folder: Path, arch: str = "llama", kind: str = "F32", **settings: Any) -> Path:
    """A random model with the tokenizer of tests.factories, and its checkpoint."""
    shutil.copytree(made(_write_random, arch, kind, sorted(settings.items())), folder, dirs_exist_ok=True)
    return folder / "model.gguf"


def _write_builtin(folder: Path, kind: str, manifest: Path) -> None:
    path = folder / f"tales-{kind}.gguf"
    if kind in _WRITTEN:
        write_gguf(builtin_checkpoint(), path, kind)
    else:
        quantize_gguf(builtin_gguf("F32"), path, kind)


def _write_checkpoint(folder: Path, manifest: Path) -> None:
    bundle, folder = open_bundle(manifest.parent), folder / "tales"
    folder.mkdir()
    save_file(dict(_tensors(bundle)), folder / "model.safetensors")
    for name in _TEXTS:
        (folder / name).write_text(bundle.read_text(name), "utf-8")
    special = bundle.read_object("special_tokens.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in special.items() if v}), "utf-8")
    (folder / "config.json").write_text(json.dumps(_config(bundle)), "utf-8")


def _write_random(folder: Path, arch: str, kind: str, settings: list[tuple[str, Any]]) -> None:
    make_checkpoint(folder / "checkpoint", arch, **dict(settings))
    write_gguf(folder / "checkpoint", folder / "model.gguf", kind)


def _tensors(bundle: Bundle) -> list[tuple[str, np.ndarray[Any, np.dtype[np.float32]]]]:
    spec = bundle.manifest.decoder
    assert spec is not None
    found = [("model.embed_tokens.weight", bundle.tensor("embed")), ("model.norm.weight", bundle.tensor("final_norm"))]
    for i in range(spec.num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        parts = np.split(bundle.tensor(f"{ours}.attn.qkv"), (spec.q_size, spec.q_size + spec.kv_size))
        gate, up = np.split(bundle.tensor(f"{ours}.mlp.gate_up"), 2)
        found += [(f"{theirs}.self_attn.{n}_proj.weight", part) for n, part in zip("qkv", parts, strict=True)]
        found += [
            (f"{theirs}.self_attn.o_proj.weight", bundle.tensor(f"{ours}.attn.out")),
            (f"{theirs}.mlp.gate_proj.weight", gate),
            (f"{theirs}.mlp.up_proj.weight", up),
            (f"{theirs}.mlp.down_proj.weight", bundle.tensor(f"{ours}.mlp.down")),
            (f"{theirs}.input_layernorm.weight", bundle.tensor(f"{ours}.attn_norm")),
            (f"{theirs}.post_attention_layernorm.weight", bundle.tensor(f"{ours}.mlp_norm")),
        ]
    return [(name, np.ascontiguousarray(tensor)) for name, tensor in found]


def _config(bundle: Bundle) -> dict[str, Any]:
    spec = bundle.manifest.decoder
    assert spec is not None and spec.tied
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 3,
    }


_ROWS = 128


class GgufModel:
    """A GGUF file in llama.cpp, on the CPU with a float32 cache and without flash attention.

    Raises:
        BackendError: llama.cpp cannot load it.
    """

    def __init__(self, path: Path, context: int, threads: int = 1) -> None:
        self._lib = lib = llama_library()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = lib.llama_model_load_from_file(str(path).encode(), params)
        options = lib.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = context, _ROWS, _ROWS
        options.n_threads = options.n_threads_batch = threads
        # The cache must not blur what the weights do.
        options.type_k = options.type_v = lib.GGML_TYPE_F32
        options.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = lib.llama_init_from_model(self._model, options) if self._model else None
        if not self._context:
            raise BackendError(f"llama.cpp cannot load {path}.", "Write the file again.")
        self._vocab_size = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model)))
        self._batch = lib.llama_batch_init(_ROWS, 0, 1)

    def logits(self, tokens: Sequence[int]) -> Iterator[npt.NDArray[np.float32]]:
        """The logits after each token of a text, (R, V) at a time, which the next overwrite; empties the cache.

        Raises:
            BackendError: the text does not fit the context.
        """
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        for start in range(0, len(tokens), _ROWS):
            yield self._forward(tokens[start : start + _ROWS], start)

    def _forward(self, tokens: Sequence[int], start: int) -> npt.NDArray[np.float32]:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, start + index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            batch.logits[index] = True
        if self._lib.llama_decode(self._context, batch) != 0:
            raise BackendError("llama.cpp cannot evaluate the text.", "Give a larger context.")
        pointer = self._lib.llama_get_logits(self._context)
        rows: npt.NDArray[np.float32] = np.ctypeslib.as_array(pointer, shape=(len(tokens), self._vocab_size))
        return rows

    def close(self) -> None:
        """Frees the model."""
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
