"""`edgeinfer inspect`: what a bundle or GGUF file consists of."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import edgeinfer
from edgeinfer import hub
from edgeinfer.apps.cli.inputs import engine_of, engine_words, prepared
from edgeinfer.apps.cli.output import print_json, print_note, print_table, progress_bar
from edgeinfer.apps.cli.parser import add_command, add_json_option
from edgeinfer.bundle.geometry import PAGED_KV
from edgeinfer.bundle.gguf.metadata import GgufArray, Value
from edgeinfer.bundle.gguf.reader import GgufFile, GgufTensor
from edgeinfer.bundle.gguf_bundle import KV_TYPES, kv_bytes_per_token
from edgeinfer.bundle.manifest import Manifest, PlannedTensor, QualityRecord, TensorEntry
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.static_graph import StaticGraphs
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.options import format_size

if TYPE_CHECKING:
    from edgeinfer.apps.cli.parser import Subparsers


PLAN_HEADER = ("matrices", "bits", "size", "predicted divergence")
_NUMBER = re.compile(r"\.\d+(?=\.)")


def plan_rows(manifest: Manifest) -> list[tuple[str, ...]]:
    """Make a row per projection: how many of its matrices have which bits, their size and, if known, the predicted
    loss."""
    if manifest.plan is None:
        return []
    sizes = {tensor.name: tensor.nbytes for tensor in manifest.tensors}
    projections: dict[str, list[PlannedTensor]] = {}
    for tensor in manifest.plan.tensors:
        projections.setdefault(_NUMBER.sub(".*", tensor.name), []).append(tensor)
    rows = []
    for projection, members in projections.items():
        size = sum(sizes.get(member.name, 0) for member in members)
        counts = Counter((member.bits, member.type) for member in members)
        bits = ", ".join(f"{kind or bits} ({count})" for (bits, kind), count in sorted(counts.items()))
        costs = [member.predicted_kl for member in members if member.predicted_kl is not None]
        rows.append((projection, bits, format_size(size) if size else "", f"{sum(costs):.4g}" if costs else ""))
    total = manifest.plan.predicted_kl
    if total is None:
        return [row[:3] for row in rows]
    return [*rows, ("all", "", format_size(manifest.weight_bytes), f"{total:.4g}")]


def plan_facts(manifest: Manifest) -> dict[str, Any] | None:
    """Summarize the plan of bits; the manifest has each matrix."""
    plan = manifest.plan
    if plan is None:
        return None
    types = {tensor.name: tensor.type for tensor in plan.tensors if tensor.type}
    return {
        "method": plan.method,
        "budget_bytes": plan.budget_bytes,
        "weight_bytes": manifest.weight_bytes,
        "bits_per_weight": manifest.bits_per_weight,
        "predicted_kl": plan.predicted_kl,
        "bits": {tensor.name: tensor.bits for tensor in plan.tensors},
    } | ({"types": types} if types else {})


_DESCRIPTION = """\
Show what a model consists of: sizes, bits, memory per token, how it was made and how good it is, or the metadata of a
GGUF file, and which engine runs it; nothing is converted for that.

examples:
  edgeinfer inspect my-bundle --verify
  edgeinfer inspect model.gguf --tensors
"""


_ENGINES = {"onnx": "ONNX Runtime, with the native kernel", "llamacpp": "llama.cpp (extra gguf)"}


def add_inspect(commands: Subparsers) -> None:
    parser = add_command(commands, "inspect", execute, _DESCRIPTION)
    text = "bundle directory, .gguf file or hub id ORG/NAME (default: the built-in model)"
    parser.add_argument("path", metavar="PATH", nargs="?", help=text)
    parser.add_argument("--tensors", action="store_true", help="list every weight with its shape and type")
    text = "compare every file with its recorded sha256, or a .gguf file with the one first used on this machine"
    parser.add_argument("--verify", action="store_true", help=text)
    text = "accept a .gguf file that was replaced on purpose"
    parser.add_argument("--accept", action="store_true", help=text)
    add_json_option(parser)


def quality_rows(quality: QualityRecord | None) -> list[tuple[str, str]]:
    """What was measured after converting a model."""
    if quality is None:
        return []
    caches = [(f"{cache.kv_type} cache adds", f"{cache.divergence:.3g} nats/token") for cache in quality.caches]
    divergence = f"{quality.divergence:.3g} nats/token from the float model, over {quality.tokens} tokens"
    loops = [] if quality.repeating is None else [("replies that loop", f"{quality.repeating:.0%}")]
    return [("divergence", divergence), ("same token", f"{quality.top1:.1%}"), *loops, *caches]


def execute(args: argparse.Namespace) -> int:
    # A GGUF file itself, which is not prepared for that.
    bundle = open_bundle(hub.gguf_file(args.path) or hub.resolve(prepared(args.path, {})[0]))
    engine = None if bundle.digests else engine_of(str(bundle.gguf.path), {})
    verified: Mapping[str, str] = {}
    if args.verify or args.accept:
        with progress_bar(enabled=not args.json) as progress:
            verified = edgeinfer.verify(args.path, accept=args.accept, progress=progress)
    if args.json:
        facts = _facts(bundle, with_tensors=args.tensors) | ({"verified": True} if verified else {})
        print_json(facts | ({"runs_on": engine | {"prepared": _prepared(bundle)}} if engine else {}))
        return 0
    print_table(_summary(bundle, engine), title=str(_path(bundle)))
    _section("files", [(name, format_size(entry.bytes)) for name, entry in bundle.manifest.files.items()])
    given = {name: value for name, value in bundle.manifest.export.items() if name == "bits" or value is not None}
    _section("made with", [(name, "auto" if value is None else _plain(value)) for name, value in given.items()])
    _section("figures", [(name, f"{value:.6g}") for name, value in bundle.manifest.figures.items()])
    _section("quality", quality_rows(bundle.manifest.quality))
    _section("bits", plan_rows(bundle.manifest), header=PLAN_HEADER)
    if bundle.header is not None:
        gguf = bundle.header
        _section("metadata", [(key[:_CHARACTERS], _shown(value)) for key, value in gguf.metadata.items()])
        _section("types", _type_rows(gguf), header=_TYPE_HEADER)
        _section("tensors", _tensor_rows(gguf) if args.tensors else (), header=_TENSOR_HEADER)
        geometry = bundle.manifest.geometry
        native = engine is not None and engine["reason"] is None
        caches = {kv: geometry.kv_bytes_per_token(kv) for kv in PAGED_KV} if native else _kv_bytes(gguf)
        _section("memory it will need", _memory_rows(gguf, caches, geometry.max_positions))
    elif args.tensors:
        rows = [
            (each.name, _shape(each), _bits(each), str(each.block_size or ""), format_size(each.nbytes))
            for each in bundle.manifest.tensors
        ]
        _section("tensors", rows, header=("name", "shape", "bits", "block", "size"))
    if "first" in verified.values():
        print_note("The file is now trusted as long as it does not change.")
    elif verified:
        print_note("Every file matches its sha256.")
    return 0


def _path(bundle: Bundle) -> Path:
    """The inspected folder or file."""
    return bundle.path if bundle.digests else bundle.gguf.path


def _section(title: str, rows: Sequence[tuple[str, ...]], header: tuple[str, ...] = ()) -> None:
    if rows:
        print_table(rows, title=f"\n{title}", header=header)


def _prepared(bundle: Bundle) -> str | None:
    """The bundle that was made of a GGUF file for the native kernel."""
    path = hub.find_model(bundle.gguf.path).path
    return None if path is None or path.is_file() else str(path)


def _engine_rows(bundle: Bundle, engine: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    """What runs a GGUF file, and what that costs."""
    missing = engine["reason"] is not None and find_spec("llama_cpp") is None
    yield "runs on", engine_words(engine) + ("; not installed: extra gguf" if missing else "")
    if engine["reason"] is None:
        prepared = _prepared(bundle)
        size = "when it is first loaded, once, in about as many bytes"
        yield "prepared", size if prepared is None else f"in {prepared}"
        bits = bundle.manifest.bits_per_weight
        yield "speed", f"that of {bits:.2f} bits per parameter"


def _summary(bundle: Bundle, engine: Mapping[str, str | None] | None) -> list[tuple[str, str]]:
    manifest = bundle.manifest
    geometry, able = manifest.geometry, manifest.capabilities
    abilities = {"layer skipping": able.layer_skip, "early exit": able.hidden, "draft trees": able.tree}
    abilities |= {"drafts from half the bits": able.high_planes}
    rows = [
        ("name", manifest.name),
        ("architecture", manifest.architecture),
        *(_engine_rows(bundle, engine) if engine else [("runs on", _ENGINES.get(manifest.backend, manifest.backend))]),
        ("parameters", f"{manifest.parameters:,}"),
        ("weights", f"{format_size(manifest.weight_bytes)}, {manifest.bits_per_weight:.2f} bits per parameter"),
        ("layers", f"{geometry.num_layers}, hidden size {geometry.hidden_size}, vocabulary {geometry.vocab_size:,}"),
        ("context", f"up to {geometry.max_positions:,} tokens"),
    ]
    if engine is None or engine["reason"] is not None:  # else they are the prepared bundle's
        rows.append(("capabilities", ", ".join(name for name, has in abilities.items() if has) or "plain decoding"))
    if bundle.header is None:
        rows.insert(5, ("layout", manifest.layout))
        kinds = ", ".join(bundle.kv_types(manifest.layout))
        rows.insert(7, ("KV cache", f"{geometry.kv_bytes_per_token():,} bytes per token in float32; types {kinds}"))
    if manifest.static is not None:
        rows.append(("shapes", _shapes(manifest.static)))
    plan = manifest.plan
    if plan is not None:
        calibrated = f", calibrated on {plan.calibration_tokens:,} tokens" if plan.calibration_tokens else ""
        kept = bundle.header is None and manifest.export.get("format") == "gguf"
        rows.append(
            ("quantized by", "a GGUF file's makers, whose types it keeps" if kept else f"{plan.method}{calibrated}")
        )
    if plan is not None and plan.budget_bytes is not None:
        rows.append(("budget", f"{format_size(plan.budget_bytes)} of weights"))
    if manifest.exits:
        every = len(manifest.exits) == geometry.num_layers
        rows.append(("exit layers", "any" if every else ", ".join(map(str, manifest.exits))))
    if manifest.drafters:
        rows.append(("drafters", ", ".join(manifest.drafters)))
    return rows


def _shapes(static: StaticGraphs) -> str:
    widths = ", ".join(map(str, static.widths))
    layers = "" if static.layers[-1] == len(static.layers) - 1 else f"; layers {', '.join(map(str, static.layers))}"
    return f"passes of {widths} rows, prompts by {static.chunk}, {static.context:,} tokens in all{layers}"


def _shape(tensor: TensorEntry | GgufTensor) -> str:
    return " x ".join(map(str, tensor.shape))


def _bits(tensor: TensorEntry) -> str:
    """Bits of a value, or GGUF's types of the rows."""
    return "+".join(segment.kind for segment in tensor.segments) or str(tensor.bits)


def _facts(bundle: Bundle, *, with_tensors: bool) -> dict[str, Any]:
    manifest = bundle.manifest
    data: dict[str, Any] = json.loads(manifest.to_json())
    if not with_tensors:
        del data["tensors"]
    data |= {
        "path": str(_path(bundle)),
        "weight_bytes": manifest.weight_bytes,
        "bits_per_weight": manifest.bits_per_weight,
    }
    if bundle.header is not None:
        return data | {"gguf": _gguf_facts(bundle.header, with_tensors=with_tensors)}
    return data | {"kv_bytes_per_token": manifest.geometry.kv_bytes_per_token()}


def _plain(value: str | int | float | bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


_TENSOR_HEADER = ("name", "shape", "type", "size", "offset")
_TYPE_HEADER = ("type", "tensors", "size", "bits per value")
# Tokens of the example of a KV cache.
_EXAMPLE_TOKENS = 2048
# Most items of an array, and characters of a text.
_ITEMS, _CHARACTERS = 4, 80


def _type_rows(gguf: GgufFile) -> list[tuple[str, str, str, str]]:
    """Sum the size of each tensor type, largest first."""
    sizes, counts = Counter[str](), Counter[str]()
    bits = {tensor.type.name: tensor.type.bits for tensor in gguf.tensors}
    for tensor in gguf.tensors:
        sizes[tensor.type.name] += tensor.nbytes
        counts[tensor.type.name] += 1
    return [(name, str(counts[name]), format_size(size), f"{bits[name]:.4g}") for name, size in sizes.most_common()]


def _tensor_rows(gguf: GgufFile) -> list[tuple[str, ...]]:
    """List every tensor; in a model of several files, with the file's number before the offset."""
    several = len(gguf.splits) > 1
    return [
        (
            tensor.name,
            _shape(tensor),
            tensor.type.name,
            format_size(tensor.nbytes),
            f"{tensor.split + 1}: {tensor.offset:,}" if several else f"{tensor.offset:,}",
        )
        for tensor in gguf.tensors
    ]


def _memory_rows(gguf: GgufFile, caches: Mapping[str, int | None], context: int) -> list[tuple[str, str]]:
    """Estimate the least memory: weights mapped in place, and the KV cache by type."""
    rows = [("weights", format_size(gguf.tensor_bytes))]
    tokens = min(_EXAMPLE_TOKENS, context)
    for kv, per_token in caches.items():
        shown = "not supported: a head is not a multiple of its blocks"
        if per_token is not None:
            shown = f"{per_token:,} bytes per token, {format_size(per_token * tokens)} for {tokens:,}"
        rows.append((f"KV cache {kv}", shown))
    return rows


def _gguf_facts(gguf: GgufFile, *, with_tensors: bool) -> dict[str, Any]:
    """Facts for JSON; arrays are cut."""
    facts: dict[str, Any] = {
        "version": gguf.splits[0].version,
        "alignment": gguf.splits[0].alignment,
        "files": [str(split.path) for split in gguf.splits],
        "fingerprint": gguf.fingerprint,
        "metadata": {key: _as_json(value) for key, value in gguf.metadata.items()},
        "memory": {"weight_bytes": gguf.tensor_bytes, "kv_bytes_per_token": _kv_bytes(gguf)},
    }
    if with_tensors:
        facts["tensors"] = [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "type": tensor.type.name,
                "bytes": tensor.nbytes,
                "file": tensor.split,
                "offset": tensor.offset,
            }
            for tensor in gguf.tensors
        ]
    return facts


def _kv_bytes(gguf: GgufFile) -> dict[str, int | None]:
    return {kv: kv_bytes_per_token(gguf, kv) for kv in KV_TYPES if kv != "float32"}


def _shown(value: Value) -> str:
    if isinstance(value, GgufArray):
        items = ", ".join(_shown(item) for item in _first_items(value))
        more = ", ..." if value.count > _ITEMS else ""
        return f"{value.count:,} x {value.item_type}: {items}{more}" if value.count else f"no {value.item_type}"
    if isinstance(value, str):
        # Escaped: a file may contain terminal control codes.
        return repr(value) if len(value) <= _CHARACTERS else f"{value[:_CHARACTERS]!r}... ({len(value):,} characters)"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def _as_json(value: Value) -> Any:
    if isinstance(value, GgufArray):
        return {
            "type": value.item_type,
            "count": value.count,
            "first": [_as_json(item) for item in _first_items(value)],
        }
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _first_items(value: GgufArray) -> list[Any]:
    if value.item_type == "string":
        return [text.decode("utf-8", "replace") for text in itertools.islice(value.spellings(), _ITEMS)]
    items: list[Any] = value.numbers()[:_ITEMS].tolist()
    return items
