"""A checkpoint as GGUF files of llama.cpp's types, or of types chosen for the same bytes; knows no measures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.gguf.reader import read_gguf

__all__ = ["GgufCandidates", "tensor_sizes"]

Floats = NDArray[np.float32]


class GgufCandidates:
    """Makes files in a folder. Methods need the export and the gguf extra.

    Args:
        texts: token ids to calibrate with.
    """

    def __init__(self, checkpoint: Path, folder: Path, texts: Sequence[Sequence[int]]) -> None:
        self._checkpoint, self._folder = checkpoint, folder
        self._texts = [np.asarray(text, np.int64) for text in texts]

    def make(self, kind: str, importance: bool, chosen: bool = False) -> Path:
        """The checkpoint in a type of files, replacing what was made before.

        Args:
            importance: give the quantizer importance data.
            chosen: choose each tensor's type instead, for as many bytes as that file has.
        """
        from edgeinfer.export.gguf.quantize import quantize_gguf

        out = self._folder / "candidate.gguf"
        data = self._importance if importance else None
        quantize_gguf(self._floats, out, kind, importance=data, threads=1)
        if chosen:
            kind, types = self._choose(read_gguf(out).size - read_gguf(out).data_offset, data)
            quantize_gguf(self._floats, out, kind, importance=data, tensor_types=types, threads=1)
        return out

    @cached_property
    def _floats(self) -> Path:
        from edgeinfer.export.gguf.writer import write_gguf

        path = self._folder / "float32.gguf"
        write_gguf(self._checkpoint, path, vocabulary=False)
        return path

    @cached_property
    def _importance(self) -> dict[str, Floats]:
        from edgeinfer.export.checkpoint import Checkpoint
        from edgeinfer.export.gguf.importance import gather_importance
        from edgeinfer.export.gguf.writer import open_subject
        from edgeinfer.export.planned_tensors import PlannedTensors

        with Checkpoint(self._checkpoint) as checkpoint:
            subject = open_subject(checkpoint)
            reader = PlannedTensors(checkpoint, subject.computing)
            return gather_importance(subject.spec, reader, self._texts, subject.tensors)

    def _choose(self, budget: int, importance: dict[str, Floats] | None) -> tuple[str, dict[str, str]]:
        """The type of the file and of its tensors for so many bytes."""
        from edgeinfer.export.checkpoint import Checkpoint
        from edgeinfer.export.gguf.allocation import choose_types
        from edgeinfer.export.gguf.writer import open_subject
        from edgeinfer.export.planned_tensors import PlannedTensors
        from edgeinfer.quant.probing import probe_tokens
        from edgeinfer.quant.sensitivity import choose_texts

        with Checkpoint(self._checkpoint) as checkpoint:
            subject = open_subject(checkpoint)
            reader = PlannedTensors(checkpoint, subject.computing)
            tokens = probe_tokens(subject.spec, subject.parameters)
            texts = choose_texts(self._texts, tokens, subject.spec.vocab_size)
            plan = choose_types(subject.spec, reader, texts, subject.tensors, budget, importance)
        return plan.kind, dict(plan.types)


def tensor_sizes(path: Path) -> tuple[int, int, dict[str, int]]:
    """Weights of a GGUF file, the bytes of their tensors without any metadata, and the weights by type of tensor."""
    file = read_gguf(path)
    kinds: Counter[str] = Counter()
    for tensor in file.tensors:
        kinds[tensor.type.name] += tensor.size
    return sum(kinds.values()), file.tensor_bytes, dict(kinds)
