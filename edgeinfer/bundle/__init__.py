"""The bundle format: all that export and runtime share."""

from edgeinfer.bundle.geometry import Geometry, KVLayer, StateLayer
from edgeinfer.bundle.layouts import LAYOUTS, MODEL, NATIVE, PORTABLE, STATIC, WEIGHTS, Layout
from edgeinfer.bundle.manifest import Blob, Capabilities, FileEntry, Manifest, TensorEntry
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.spec import DecoderSpec, MoESpec, RopeSpec
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.writing import MANIFEST, seal, write_bundle, write_file

__all__ = [
    "LAYOUTS",
    "MANIFEST",
    "MODEL",
    "NATIVE",
    "PORTABLE",
    "STATIC",
    "WEIGHTS",
    "Blob",
    "Bundle",
    "Capabilities",
    "DecoderSpec",
    "FileEntry",
    "Geometry",
    "KVLayer",
    "Layout",
    "Manifest",
    "MoESpec",
    "RopeSpec",
    "StateLayer",
    "TensorEntry",
    "open_bundle",
    "seal",
    "write_bundle",
    "write_file",
]
