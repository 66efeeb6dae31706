"""From a checkpoint to a bundle with a GGUF file of the requested layers and types, whole or not at all.

At the end llama.cpp's tokens of some texts are compared with those of the tokenizer.json that the file was made from.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.gguf.library import llama_library
from edgeinfer.bundle.gguf.metadata import ggml_type
from edgeinfer.bundle.gguf.normalizer import GgufNormalizer
from edgeinfer.bundle.gguf.reader import read_gguf
from edgeinfer.bundle.gguf_bundle import manifest_of
from edgeinfer.bundle.manifest import PlanRecord
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.store import GGUF_MODEL
from edgeinfer.bundle.writing import seal, write_bundle
from edgeinfer.core.errors import BackendError, CheckpointError, StorageError, UsageError
from edgeinfer.core.results import Progress
from edgeinfer.export.architectures.planned_tensors import PlannedTensors
from edgeinfer.export.gguf.allocation import (
    Importance,
    TensorTypes,
    check_budget,
    choose_types,
    file_kind,
    gather_importance,
)
from edgeinfer.export.gguf.architectures import FILE_TYPES, ONNX_HINT, context_length
from edgeinfer.export.gguf.pruning import (
    check_layers,
    check_prunable,
    choose_layers,
    is_pruned,
    prune_tokens,
    renumbered,
)
from edgeinfer.export.gguf.quantize import quantize_gguf
from edgeinfer.export.gguf.tensors import PlannedGgufTensor
from edgeinfer.export.gguf.vocabulary import Vocabulary, read_vocabulary
from edgeinfer.export.gguf.writer import GgufSource, open_gguf_source, write_gguf_source, written_bytes
from edgeinfer.export.options import COPY, NO_TEXT, PACKED_KIND, ExportConfig, find_file_type
from edgeinfer.export.source.calibration_text import CalibrationText, read_calibration_text
from edgeinfer.export.source.checkpoint import Checkpoint
from edgeinfer.export.source.packed import MXFP4
from edgeinfer.export.source.sidecar import Sidecar, read_sidecar
from edgeinfer.quant.calibration import ModelReader, default_tokens
from edgeinfer.quant.policy import match_patterns
from edgeinfer.quant.probing import probe_tokens
from edgeinfer.quant.sensitivity import choose_texts

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

_LAYER = re.compile(r"layers\.(\d+)\.")

# For people to read in the manifest.
Facts = dict[str, str | int | float | bool | None]
_log = logging.getLogger("edgeinfer")
_FLOAT_FILE = "float.gguf"
# Types that hold what a stored one does, so that nothing is lost before quantizing.
_FLOATS = {"F32": "F32", "F16": "F16", "BF16": "BF16", "F64": "F32"}
# Largest size of a mixture around a type, relative to all weights in that type: embedding and head have more bits.
_MIXTURE = 1.25


@dataclass(frozen=True)
class Shrunk:
    """A shrunk file."""

    kind: str  # type of the file
    record: PlanRecord  # for the manifest
    pruned: tuple[int, ...]  # layers of the checkpoint that were left out


def check_request(checkpoint: Checkpoint, described: GgufSource, config: ExportConfig) -> None:
    """Refuses requests that `shrink` would refuse, as far as that is known before anything is written."""
    layers = config.prune_layers or tuple(range(config.prune_count))
    if layers:
        check_layers(described.arch.name, described.spec.num_layers, layers)
    model = _Model.of(checkpoint, described).without(config.prune_layers)
    if described.arch.rewrite is not None and (config.is_calibrated or config.has_budget):
        message = f"Calibrating GGUF files of {described.arch.name} is not supported."
        raise UsageError(message, "Choose a type of llama.cpp's, such as --type Q4_K_M, or export it to ONNX.")
    given = match_patterns(config.types_for, model.matrices)
    budget = config.budget_bytes(model.parameters)
    if budget is not None and not config.prune_count:
        check_budget(model.tensors, budget, given)


def shrink(
    source: Path,
    target: Path,
    checkpoint: Checkpoint,
    described: GgufSource,
    tokenizer: bytes,
    config: ExportConfig,
    progress: Progress | None = None,
) -> Shrunk:
    """Rewrites a float file with the layers and types of a configuration."""
    text = _read_text(config, described, tokenizer)
    texts = None if text is None else text.texts
    model = _Model.of(checkpoint, described)
    written = read_gguf(source)
    pruned = config.prune_layers
    if config.prune_count:
        tokens = prune_tokens(described.spec, described.parameters, config.prune_count)
        assert texts is not None, "layers are chosen by a text"
        chosen = choose_texts(texts, tokens)
        pruned = choose_layers(model.spec, model.reader, chosen, config.prune_count, progress)
    check_prunable(written, pruned)
    model = model.without(pruned)
    importance = None
    if texts is not None:
        importance = gather_importance(model.spec, model.reader, texts, model.tensors, progress)
    plan = _plan(config, model, texts, importance, written.splits[0].data_offset, progress)
    names = {renumbered(t.name, pruned): t.name for t in described.tensors if not is_pruned(t.name, pruned)}
    quantize_gguf(
        source,
        target,
        plan.kind,
        importance=None if importance is None else {names[name]: found for name, found in importance.items()},
        tensor_types={names[name]: kind for name, kind in plan.types.items()},
        prune_layers=pruned,
        progress=progress,
    )
    record = plan.record(*(() if text is None else (text.sha256, text.tokens)))
    return Shrunk(config.gguf_kind if plan.kind == COPY.name else plan.kind, record, pruned)


@dataclass(frozen=True)
class _Model:
    """The model that calibration runs, and the tensors of its file."""

    spec: DecoderSpec
    reader: ModelReader
    tensors: Sequence[PlannedGgufTensor]

    @classmethod
    def of(cls, checkpoint: Checkpoint, described: GgufSource) -> _Model:
        return cls(described.spec, PlannedTensors(checkpoint, described.computing), described.tensors)

    @property
    def matrices(self) -> list[str]:
        """Names of the tensors whose type can be chosen."""
        return [tensor.name for tensor in self.tensors if not tensor.exact]

    @property
    def parameters(self) -> int:
        """Number of weights; a head that the file stores in addition to a shared embedding is counted too."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    def without(self, pruned: tuple[int, ...]) -> _Model:
        """The model without some layers, the others renumbered."""
        if not pruned:
            return self
        kept = [layer for layer in range(self.spec.num_layers) if layer not in pruned]
        windows = tuple(self.spec.windows[layer] for layer in kept) if self.spec.windows else ()
        spec = dataclasses.replace(self.spec, num_layers=len(kept), windows=windows)
        tensors = [_moved(tensor, pruned) for tensor in self.tensors if not is_pruned(tensor.name, pruned)]
        return _Model(spec, _Shortened(self.reader, kept), tensors)


class _Shortened:
    """Weights of a model by layer numbers after layers were left out."""

    def __init__(self, reader: ModelReader, kept: Sequence[int]) -> None:
        self._reader, self._kept = reader, kept

    def tensor(self, name: str) -> Floats:
        return self._reader.tensor(self._original(name))

    def rows(self, name: str, rows: Ints) -> Floats:  # (M,) -> (M, D)
        return self._reader.rows(self._original(name), rows)

    def _original(self, name: str) -> str:
        return _LAYER.sub(lambda found: f"layers.{self._kept[int(found[1])]}.", name, count=1)


def _moved(tensor: PlannedGgufTensor, pruned: tuple[int, ...]) -> PlannedGgufTensor:
    """A tensor with its layer number after layers were left out."""

    def number(found: re.Match[str]) -> str:
        layer = int(found[1])
        return f"layers.{layer - sum(p < layer for p in pruned)}."

    parts = tuple(dataclasses.replace(part, plan=_LAYER.sub(number, part.plan, count=1)) for part in tensor.parts)
    return dataclasses.replace(tensor, name=renumbered(tensor.name, pruned), parts=parts)


def _read_text(config: ExportConfig, described: GgufSource, tokenizer: bytes) -> CalibrationText | None:
    if not config.is_calibrated:
        return None
    tokens = config.calibration_tokens or default_tokens(described.parameters)
    return read_calibration_text(config.calibration, tokenizer, tokens, described.spec.max_positions)


def _plan(
    config: ExportConfig,
    model: _Model,
    texts: Sequence[Ints] | None,
    importance: Importance | None,
    header: int,
    progress: Progress | None,
) -> TensorTypes:
    """The types of the file and of its tensors, by name or by size."""
    given = match_patterns(config.types_for, model.matrices)
    budget = config.budget_bytes(model.parameters)
    if budget is not None:
        # A size is of the whole file, bits are of its tensors.
        budget -= header if config.target_size is not None else 0
        assert texts is not None, "types are chosen by a text"
        chosen = choose_texts(texts, probe_tokens(model.spec, model.parameters))
        return choose_types(model.spec, model.reader, chosen, model.tensors, budget, importance, given, progress)
    kind = find_file_type(config.gguf_kind)
    if not kind.is_float:
        return TensorTypes(kind.name, given, {}, None)
    if not given:
        return TensorTypes(COPY.name, {}, {}, None)
    # llama.cpp looks at single types in files of a quantized type only.
    types: Mapping[str, str] = dict.fromkeys(model.matrices, kind.base) | given
    return TensorTypes(file_kind(types, model.tensors), types, {}, None)


def export_gguf(source: Path, out: Path, config: ExportConfig, progress: Progress | None = None) -> Path:
    """Exports to a GGUF file in a bundle."""
    kind = config.gguf_kind
    with Checkpoint(source) as checkpoint:
        described = open_gguf_source(checkpoint)
        check_request(checkpoint, described, config)
        sidecar = read_sidecar(source, described.config)
        words = read_vocabulary(source, described.config, described.spec.vocab_size)
        name = config.name or source.resolve().name
        direct = kind in FILE_TYPES and not config.is_reworked
        if not direct and (kind != PACKED_KIND or config.is_reworked):
            described = described.unpacked
        first = kind if direct or find_file_type(kind).is_float else _float_type(checkpoint, described)
        with write_bundle(out, replace_existing=config.force) as work:
            _check_room(work, described, first, kind)
            sidecar.write(work, table=False)
            written = work / (GGUF_MODEL if direct else _FLOAT_FILE)
            write_gguf_source(checkpoint, described, words, written, first, name=name, progress=progress)
            facts = _check_vocabulary(written, words, sidecar)
            record, pruned = None, False
            if not direct:
                tokenizer = sidecar.files["tokenizer.json"]
                shrunk = shrink(written, work / GGUF_MODEL, checkpoint, described, tokenizer, config, progress)
                record, facts["type"], pruned = shrunk.record, shrunk.kind, bool(shrunk.pruned)
                if pruned:
                    facts["pruned_layers"] = " ".join(map(str, shrunk.pruned))
                written.unlink()
            base = manifest_of(read_gguf(work / GGUF_MODEL))
            context = context_length(described.spec, described.arch)
            if context < described.spec.max_positions:
                facts["context_of_window"] = context
            manifest = dataclasses.replace(
                base,
                name=name,
                architecture=described.config.architecture or described.config.model_type,
                parameters=base.parameters if pruned else described.parameters,
                files={},
                export=config.options | facts,
                plan=record,
            )
            seal(work, manifest)
    return out


def write_float_file(source: Path, target: Path, calibration: str) -> Importance | None:
    """Writes a checkpoint as floats, for quantizing to several types; the importance of its columns in a text, of which
    "default" is the one that ships, and "none" none."""
    with Checkpoint(source) as checkpoint:
        described = open_gguf_source(checkpoint).unpacked
        sidecar = read_sidecar(source, described.config)
        words = read_vocabulary(source, described.config, described.spec.vocab_size)
        kind = _float_type(checkpoint, described)
        write_gguf_source(checkpoint, described, words, target, kind, name=source.resolve().name)
        if calibration == NO_TEXT:
            return None
        tokens, tokenizer = default_tokens(described.parameters), sidecar.files["tokenizer.json"]
        text = read_calibration_text(calibration, tokenizer, tokens, described.spec.max_positions)
        model = _Model.of(checkpoint, described)
        return gather_importance(model.spec, model.reader, text.texts, model.tensors)


def _float_type(checkpoint: Checkpoint, described: GgufSource) -> str:
    """The common type of the checkpoint's tensors, else float32. BF16 holds all values of MXFP4 too."""
    sources = [source for plan in described.plans for source in plan.sources]
    types = {checkpoint.dtype(source.name) for source in sources if not source.packing}
    packings = {source.packing for source in sources if source.packing}
    if len(types) != 1 or (packings and (packings, types) != ({MXFP4}, {"BF16"})):
        return "F32"
    return _FLOATS[types.pop()]


def _check_room(work: Path, described: GgufSource, first: str, kind: str) -> None:
    needed = written_bytes(described, first)
    if first != kind:
        base = ggml_type(find_file_type(kind).base)
        needed += int(_MIXTURE * described.parameters * base.block_bytes / base.block_values)
    free = shutil.disk_usage(work).free
    if free < needed:
        message = f"The export takes {needed / 1e9:.1f} GB of disk space, and only {free / 1e9:.1f} GB are free."
        raise StorageError(message, "Free some space or choose another place.")


def _check_vocabulary(written: Path, words: Vocabulary, sidecar: Sidecar) -> Facts:
    """Facts on the tokenizer for the manifest; it is compared where llama.cpp is installed."""
    if find_spec("llama_cpp") is None:
        return {"tokenizer_check": "skipped: llama-cpp-python is not installed"}
    found = check_tokenizer(written, sidecar.files["tokenizer.json"], words)
    if found.different:
        _log.warning(
            "llama.cpp tokenizes %d rare texts, such as %r, differently from tokenizer.json.",
            len(found.different),
            found.different[0],
        )
    return {"tokenizer_texts": found.texts, "tokenizer_differences": len(found.different)}


# What every text is made of; a difference here is a wrong tokenizer.
ORDINARY = (
    "Once upon a time, there was a little dog named Max. He didn't like the rain!",
    "She said: \"I'll be there at 10:45, won't I?\" They've gone; we're late - it's 3.14159% of 1,000,000.",
    "def main(args):\n    for i in range(10):\n\tprint(f'{i:>4}', end='\\n')\n\n\nreturn {\"a\": [1, 2]}",
    "# Title\n\n* one\n* two\n\n1. three\r\n2. four\r\n",
    "x = (a+b)*c != d && e <= f || !g; // http://example.com/path?q=1&r=2#s",
    "CamelCase snake_case SHOUTING kebab-case O'Brien I'M HE'S WE'LL",
    "Die Straße heißt „Größe“ – où naïve café coûte 5 € à Noël, señor.",
    "12345678901234567890 007 1st 2nd 3rd v1.2.3 0xDEADBEEF",
)
# What texts may hold; differences are counted, as versions of Unicode's tables differ.
RARE = (
    "  two spaces before,   three between  and two after  ",
    "tabs\t\tand\n\n\n \n spaces \t\n",
    " ",
    "\n",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u6211\u6709\uff13\u4e2a\u82f9\u679c\u3002",
    "\u3053\u3093\u306b\u3061\u306f\u4e16\u754c\u3001\u30ab\u30bf\u30ab\u30ca \uc548\ub155\ud558\uc138\uc694",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u0393\u03b5\u03b9\u03ac \u03c3\u03bf\u03c5",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f \U0001f44d\U0001f3fd",
    "e\u0301 n\u0303 \u212b \ufb01 \u00bd \u2460 \u2167 \uff21\uff22",
    "\u00a0no\u2009break\u3000wide\u200bzero\ufeffmark\u2028line",
    "\u2581 under \u2581\u2581 line \u0120 \u010a byte letters",
    "\ud7ff\ue000\ufffd\U00010000\U0010fffd",
    "'s 't 're 've 'm 'll 'd 'S 'RE \u2019s \u2019ll",
    "a" * 60 + "!" * 30 + " " * 40 + "\n" * 9,
)
# Special tokens to try; some vocabularies have thousands.
_MOST_SPECIAL = 16


@dataclass(frozen=True)
class TokenizerCheck:
    """Number of compared texts, and those that llama.cpp tokenizes differently."""

    texts: int
    different: tuple[str, ...]


def check_tokenizer(model: Path, tokenizer: bytes, vocabulary: Vocabulary) -> TokenizerCheck:
    """Compares the two tokenizers on texts of many kinds, special tokens included."""
    from tokenizers import Tokenizer

    expected = Tokenizer.from_buffer(tokenizer)
    normalize = GgufNormalizer(vocabulary.steps, vocabulary.special)
    special = (f"{t}a dog{t}{t} a cat {t} \n{t}\nthe end{t}" for t in vocabulary.special[:_MOST_SPECIAL])
    texts = [*ORDINARY, *RARE, *special]
    with llama_encoder(model) as encode:
        different = [text for text in texts if encode(normalize(text)) != expected.encode(text).ids]
    wrong = next((text for text in different if text in ORDINARY), None)
    if wrong is not None:
        message = f"llama.cpp tokenizes text such as {wrong!r} differently from tokenizer.json."
        raise CheckpointError(message, ONNX_HINT)
    return TokenizerCheck(len(texts), tuple(different))


@contextmanager
def llama_encoder(model: Path) -> Iterator[Any]:
    """Gives a function from a text to llama.cpp's tokens, with those added before and after it."""
    lib = llama_library()
    params = lib.llama_model_default_params()
    params.vocab_only = True
    handle = lib.llama_model_load_from_file(str(model).encode(), params)
    if not handle:
        raise BackendError(f"llama.cpp cannot load the vocabulary of {model}.", "Export the model again.")
    vocab = lib.llama_model_get_vocab(handle)

    def encode(text: str) -> list[int]:
        data = text.encode("utf-8")
        # A token is a byte at least, and two may be put around the text; a prefix is one more.
        ids = (ctypes.c_int32 * (len(data) + 4))()
        count = lib.llama_tokenize(vocab, data, len(data), ids, len(ids), True, True)
        return list(ids[:count])

    try:
        yield encode
    finally:
        lib.llama_model_free(handle)
