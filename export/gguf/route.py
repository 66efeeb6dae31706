"""From a checkpoint directory to a bundle with a GGUF file, whole or not at all; knows nothing of running it."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from importlib.util import find_spec
from pathlib import Path

from edgeinfer.bundle import seal, write_bundle
from edgeinfer.bundle.gguf.reader import read_gguf
from edgeinfer.bundle.gguf.types import ggml_type
from edgeinfer.bundle.gguf_bundle import manifest_of
from edgeinfer.bundle.store import GGUF_MODEL
from edgeinfer.errors import StorageError
from edgeinfer.export.checkpoint import Checkpoint
from edgeinfer.export.config import ExportConfig
from edgeinfer.export.gguf.file_types import find_file_type
from edgeinfer.export.gguf.metadata import FILE_TYPES, context_length
from edgeinfer.export.gguf.shrinking import check_request, shrink
from edgeinfer.export.gguf.tokenizer_check import check_tokenizer
from edgeinfer.export.gguf.vocabulary import Vocabulary, read_vocabulary
from edgeinfer.export.gguf.writer import Progress, Subject, open_subject, write_subject, written_bytes
from edgeinfer.export.sidecar import Sidecar, read_sidecar

__all__ = ["export_gguf"]

# For people to read in the manifest.
Facts = dict[str, str | int | float | bool | None]

_log = logging.getLogger("edgeinfer")

_FLOAT_FILE = "float.gguf"
# Types that hold what a stored one does, so that nothing is lost before quantizing.
_FLOATS = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
# What a mixture around a type is at most, beside all its weights in that type: embedding and head have more bits.
_MIXTURE = 1.25


def export_gguf(source: Path, out: Path, config: ExportConfig, progress: Progress | None = None) -> Path:
    """Exports to a GGUF file in a bundle; as `edgeinfer.export.export_checkpoint` otherwise.

    Raises:
        UsageError: a package is not installed that the type needs.
        CheckpointError: files, tensors, configuration or tokenizer of the checkpoint.
        UnsupportedArchitectureError: llama.cpp cannot express the model.
        StorageError: `out` exists or cannot be written, or the disk is too full for it.
    """
    kind = config.gguf_kind
    with Checkpoint(source) as checkpoint:
        subject = open_subject(checkpoint)
        check_request(checkpoint, subject, config)
        sidecar = read_sidecar(source, subject.config)
        words = read_vocabulary(source, subject.config, subject.spec.vocab_size)
        name = config.name or source.resolve().name
        direct = kind in FILE_TYPES and not config.is_reworked
        first = kind if direct or find_file_type(kind).is_float else _float_type(checkpoint, subject)
        with write_bundle(out, replace_existing=config.force) as work:
            _check_room(work, subject, first, kind)
            sidecar.write(work)
            written = work / (GGUF_MODEL if direct else _FLOAT_FILE)
            write_subject(checkpoint, subject, words, written, first, name=name, progress=progress)
            facts = _check_vocabulary(written, words, sidecar)
            record, pruned = None, False
            if not direct:
                tokenizer = sidecar.files["tokenizer.json"]
                shrunk = shrink(written, work / GGUF_MODEL, checkpoint, subject, tokenizer, config, progress)
                record, facts["type"], pruned = shrunk.record, shrunk.kind, bool(shrunk.pruned)
                if pruned:
                    facts["pruned_layers"] = " ".join(map(str, shrunk.pruned))
                written.unlink()
            base = manifest_of(read_gguf(work / GGUF_MODEL))
            if context_length(subject.spec) < subject.spec.max_positions:
                facts["context_of_window"] = context_length(subject.spec)
            manifest = dataclasses.replace(
                base,
                name=name,
                architecture=subject.config.architecture or subject.config.model_type,
                parameters=base.parameters if pruned else subject.parameters,
                files={},
                export=config.options | facts,
                plan=record,
            )
            seal(work, manifest)
    return out


def _float_type(checkpoint: Checkpoint, subject: Subject) -> str:
    """The type that all of the checkpoint's tensors are stored in; float32 where there are several."""
    types = {checkpoint.dtype(source.name) for plan in subject.plans for source in plan.sources}
    return _FLOATS[types.pop()] if len(types) == 1 else "F32"


def _check_room(work: Path, subject: Subject, first: str, kind: str) -> None:
    """Refuses before anything is written what the disk has no room for."""
    needed = written_bytes(subject, first)
    if first != kind:
        base = ggml_type(find_file_type(kind).base)
        needed += int(_MIXTURE * subject.parameters * base.block_bytes / base.block_values)
    free = shutil.disk_usage(work).free
    if free < needed:
        message = f"The export takes {needed / 1e9:.1f} GB of disk at its largest, {free / 1e9:.1f} GB are free."
        raise StorageError(message, "Free some space or choose another place.")


def _check_vocabulary(written: Path, words: Vocabulary, sidecar: Sidecar) -> Facts:
    """What the manifest says of the tokenizer, which is compared where llama.cpp is installed."""
    if find_spec("llama_cpp") is None:
        return {"tokenizer_check": "skipped: llama-cpp-python is not installed"}
    found = check_tokenizer(written, sidecar.files["tokenizer.json"], words)
    if found.different:
        _log.warning(
            "llama.cpp makes other tokens than tokenizer.json of %d rare texts, such as %r.",
            len(found.different),
            found.different[0],
        )
    return {"tokenizer_texts": found.texts, "tokenizer_differences": len(found.different)}
