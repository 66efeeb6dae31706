"""Names of models on the hub, and which files of a repository are a model's."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Literal

from edgeinfer.bundle.layouts import WEIGHTS
from edgeinfer.bundle.manifest import Manifest
from edgeinfer.bundle.names import part_of, quantization_of, stem_of
from edgeinfer.bundle.writing import MANIFEST
from edgeinfer.core.errors import BundleError, HubError
from edgeinfer.core.options.load import CONVERTED_BITS
from edgeinfer.core.records import dataclass

GGUF = ".gguf"
# Kinds of data a bundle may hold. Pickles, Python and shared libraries are not among them, whatever a manifest lists.
_BUNDLE_SUFFIXES = {".gguf", ".jinja", ".json", ".md", ".npz", ".onnx", ".onnx_data", ".safetensors", ".txt"}
# Files of a checkpoint that export reads. Many repositories also keep pickles, ONNX variants or a second copy of the
# weights (`consolidated.safetensors`), so a pattern such as *.safetensors would fetch gigabytes too many.
WEIGHT_PATTERNS = ("model.safetensors", "model-*-of-*.safetensors")
CONFIG_PATTERNS = (
    "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja",
    "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "*_Pooling/config.json",
    "*_Dense/config.json", "*_Dense/model.safetensors",
)  # fmt: skip
# Ids that the hub accepts: two names of letters, digits, dot, dash and underscore.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
# One GGUF file of a repository, by its type or another part of its name, as llama.cpp's own tools write it.
_TAGGED = re.compile(rf"({_HUB_ID.pattern}):([\w.-]+)", re.ASCII)
_BITS = re.compile(rf"(auto)|({'|'.join(map(str, CONVERTED_BITS))})-?bits?", re.IGNORECASE)
# Of a conversion: of every weight, or on average; or as many as the model needs.
Bits = int | Literal["auto"]
AUTO: Literal["auto"] = "auto"
# Projectors of images for a model, and data that was used to quantize it.
_OTHERS = ("mmproj", "imatrix")


@dataclass(frozen=True)
class HubName:
    """A model on the hub as users name it: ORG/NAME, ORG/NAME:TYPE, ORG/NAME:4bit or ORG/NAME:auto."""

    repo_id: str  # ORG/NAME
    tag: str | None = None  # which GGUF file, by its type or another part of its name; None where none was given
    bits: Bits | None = None  # of a checkpoint that is converted; None where none were given

    def __str__(self) -> str:
        if self.bits is not None:
            return f"{self.repo_id}:{named_bits(self.bits)}"
        return self.repo_id if self.tag is None else f"{self.repo_id}:{self.tag}"


def parse_name(model: str) -> HubName | None:
    """Takes a hub name apart; None for other names."""
    if _HUB_ID.fullmatch(model) is not None:
        return HubName(model)
    match = _TAGGED.fullmatch(model)
    if match is None:
        return None
    bits = _BITS.fullmatch(match[2])
    if bits is None:
        return HubName(match[1], match[2])
    return HubName(match[1], bits=int(bits[2]) if bits[2] else AUTO)


def named_bits(bits: Bits) -> str:
    """Bits as names of models have them: 4bit, auto."""
    return AUTO if bits == AUTO else f"{bits}bit"


def is_gguf_model(name: str) -> bool:
    """Whether a file of a repository is a GGUF model or a part of one."""
    return name.endswith(GGUF) and not any(other in name.lower() for other in _OTHERS)


def gguf_models(names: Iterable[str]) -> list[list[str]]:
    """The files of each GGUF model, its first part first."""
    models = sorted(filter(is_gguf_model, names))
    return [[n for n in models if stem_of(n) == stem_of(first)] for first in models if first_part(first)]


def first_part(name: str) -> bool:
    """Whether a GGUF file is whole, or the first of its parts, by which all are loaded."""
    return part_of(name)[0] == 1


def gguf_parts(repo_id: str, names: Iterable[str], tag: str) -> list[str]:
    """The parts of the only model that a tag means, the first one first."""
    models = sorted(name for name in names if is_gguf_model(name))
    whole = re.compile(rf"(^|[-._/]){re.escape(tag)}([-._]|$)", re.IGNORECASE)
    meant = [name for name in models if whole.search(name.removesuffix(GGUF))]
    if len({stem_of(name) for name in meant}) == 1:
        return meant
    # Q4_K_M is a part of the name UD-Q4_K_M, but not the type.
    exact = [name for name in meant if quantization_of(name) == tag.upper()]
    if len({stem_of(name) for name in exact}) == 1:
        return exact
    shown = ", ".join(name for name in meant or models if first_part(name)) or "none"
    several = f"Several GGUF files of {repo_id} are named like {tag!r}." if meant else ""
    raise HubError(several or f"{repo_id} has no GGUF file named like {tag!r}.", f"Choose one of {shown}.")


def listed_files(manifest: Path) -> list[str]:
    """The files of a bundle, its manifest included."""
    try:
        text = manifest.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise BundleError(f"{manifest} is not UTF-8 text.", "Do not use this bundle.") from error
    listing = Manifest.from_json(text)
    for name in listing.files:
        file = PurePosixPath(name)
        if file.suffix not in _BUNDLE_SUFFIXES and file.name != WEIGHTS:
            raise BundleError(f"The bundle lists {name!r}, which is not a kind of data it may hold.", "Do not use it.")
    return [MANIFEST, *listing.files]


def literal(names: Iterable[str]) -> list[str]:
    """Names as patterns that match only these names."""
    return [glob.escape(name) for name in names]
