"""The bundle format: all that export and runtime share."""

from edgeinfer.bundle.manifest import Blob, Capabilities, FileEntry, Manifest, TensorEntry
from edgeinfer.bundle.spec import DecoderSpec, Geometry, RopeSpec
from edgeinfer.bundle.store import MANIFEST, MODEL, WEIGHTS, Bundle, open_bundle, seal, write_bundle, write_file

__all__ = [
    "MANIFEST",
    "MODEL",
    "WEIGHTS",
    "Blob",
    "Bundle",
    "Capabilities",
    "DecoderSpec",
    "FileEntry",
    "Geometry",
    "Manifest",
    "RopeSpec",
    "TensorEntry",
    "open_bundle",
    "seal",
    "write_bundle",
    "write_file",
]
