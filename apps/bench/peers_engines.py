"""The engines of `edgeinfer bench peers`: what each needs, what it is given, and its name in tables.

To add one: a file in engines/, its line in worker.ENGINES, and a line in PEERS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from edgeinfer.apps.bench.peers_models import THEIR_GROUP, PeerModel
from edgeinfer.errors import BackendError

__all__ = ["PEERS", "REFERENCE", "PeerEngine", "missing"]

# llama.cpp's types with as many bits as our bundles and groups of the same size, by bits.
_GGUF = {4: "Q4_0", 8: "Q8_0"}
Make = Callable[[PeerModel, str | None], Path]


@dataclass(frozen=True)
class PeerEngine:
    """An engine.

    Attributes:
        label: its name in tables.
        kind: of worker.ENGINES.
        module: what has to be installed.
        make: its model, by an interpreter that has the engine; BackendError where that fails.
        weights: what that model holds, in the engine's own words.
        options: of the worker, beside path, threads and context.
        budget: the option that says how much memory there is; empty where it cannot be told.
        passes: of worker.ENGINES, what runs single passes of the model where the engine itself offers none.
        note: what readers of its figures should know.
    """

    label: str
    kind: str
    module: str
    make: Make
    weights: Callable[[PeerModel], str]
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    budget: str = ""
    passes: str = ""
    note: str = ""


def missing(peer: PeerEngine, python: str | None, name: str) -> str:
    """Why an engine cannot be measured here; empty where it can, or where another interpreter is to have it."""
    if python is not None or find_spec(peer.module) is not None:
        return ""
    return f"{peer.module} is not installed here; name an interpreter that has it: --python {name}=PATH"


def _bundle(model: PeerModel, python: str | None) -> Path:
    return model.bundle()


def _their_groups(model: PeerModel, python: str | None) -> Path:
    if model.group == THEIR_GROUP:
        raise BackendError(f"the weights of {model.name} are in groups of {THEIR_GROUP} anyway.", "Leave it out.")
    return model.bundle(THEIR_GROUP)


def _gguf(model: PeerModel, python: str | None) -> Path:
    return model.files.exported_gguf(_GGUF[model.bits])


def _genai(model: PeerModel, python: str | None) -> Path:
    return model.files.genai(python, model.bits)


def _openvino(model: PeerModel, python: str | None) -> Path:
    return model.files.openvino_genai(python, _GGUF[model.bits])


def _float32(model: PeerModel, python: str | None) -> Path:
    return model.files.checkpoint()


def _bfloat16(model: PeerModel, python: str | None) -> Path:
    return model.files.bfloat16()


# Plain decoding, as that of all others; nothing may be left from one process to the next.
_OURS: Mapping[str, Any] = {"speculation": "off", "remember": False}
PEERS: Mapping[str, PeerEngine] = {
    "edgeinfer": PeerEngine(
        "edgeinfer",
        "edgeinfer",
        "edgeinfer",
        _bundle,
        lambda model: f"int{model.bits} g{model.group}",
        options=_OURS,
        budget="memory",
    ),
    "edgeinfer-g32": PeerEngine(
        f"edgeinfer, groups of {THEIR_GROUP}",
        "edgeinfer",
        "edgeinfer",
        _their_groups,
        lambda model: f"int{model.bits} g{THEIR_GROUP}",
        options=_OURS,
        budget="memory",
    ),
    "llamacpp": PeerEngine("llama.cpp", "llamacpp", "llama_cpp", _gguf, lambda model: _GGUF[model.bits]),
    "genai": PeerEngine(
        "onnxruntime-genai", "genai", "onnxruntime_genai", _genai, lambda model: f"int{model.bits} g{THEIR_GROUP}"
    ),
    "openvino": PeerEngine(
        "OpenVINO GenAI",
        "openvino-genai",
        "openvino_genai",
        _openvino,
        lambda model: _GGUF[model.bits],
        passes="openvino-passes",
        note="loads the model that it made of the GGUF file; its pipeline has no passes over several tokens, so that "
        "c(m) is that model's in OpenVINO's runtime",
    ),
    "transformers": PeerEngine("transformers", "transformers", "transformers", _float32, lambda model: "float32"),
    "transformers-bf16": PeerEngine(
        "transformers bfloat16",
        "transformers",
        "transformers",
        _bfloat16,
        lambda model: "bfloat16",
        options={"dtype": "bfloat16"},
    ),
}
# Whose word the others' replies are measured by.
REFERENCE = PEERS["transformers"]
