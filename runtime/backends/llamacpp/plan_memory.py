"""What a GGUF model takes in llama.cpp, by term; knows nothing of budgets and of choosing.

The formulas are `runtime.llamacpp.memory`'s; this puts them into the plan's terms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edgeinfer.bundle import Bundle
from edgeinfer.runtime.backends.llamacpp.memory import (
    CODE_BYTES,
    compute_bytes,
    kv_bytes,
    loading_bytes,
    mapped_bytes,
    packed_bytes,
    session_bytes,
    vocabulary_bytes,
)
from edgeinfer.runtime.planning.configuration import Configuration, Footprint, Keeping

__all__ = ["GgufMemory"]


@dataclass(frozen=True)
class GgufMemory:
    """Implements `model_memory.ModelMemory`."""

    bundle: Bundle

    def import_libraries(self) -> None:
        """Imports what loading will import."""
        from edgeinfer.bundle.gguf.library import llama_library

        llama_library()

    def weights(self, configuration: Configuration) -> Footprint:
        """Repacked copies, and pages of the file."""
        gguf, mode = self.bundle.gguf, configuration.weights
        return Footprint({"weights_packed": packed_bytes(gguf, mode)}, {"weights_mapped": mapped_bytes(gguf, mode)})

    def running(self, configuration: Configuration) -> Footprint:
        """Context, cache and passes; all of them are taken when the model is loaded."""
        gguf, outputs = self.bundle.gguf, configuration.draft_max + 1
        batch = max(configuration.prefill_chunk, outputs)
        return Footprint(
            {
                "session": session_bytes(gguf),
                "kv": kv_bytes(gguf, configuration.kv, configuration.context),
                "activations": compute_bytes(gguf, configuration.kv, configuration.context, batch, outputs),
            },
            {"code": CODE_BYTES},
        )

    def tokenizer(self, keeping: Keeping, *, used: bool) -> Footprint:
        """The vocabulary, which llama.cpp loads with the model."""
        return Footprint({"tokenizer": vocabulary_bytes(self.bundle.gguf)}, {})

    def phases(self, outside: Footprint, running: Footprint, configuration: Configuration) -> Iterator[Footprint]:
        """While the file is read: what stays of it, and what was read of it and is not let go of yet."""
        gguf = self.bundle.gguf
        parts = {name: running.anonymous[name] for name in ("session", "tokenizer", "weights_packed")}
        raw = loading_bytes(gguf, configuration.weights)
        yield outside + Footprint(parts, {"code": CODE_BYTES, "weights_mapped": raw})
