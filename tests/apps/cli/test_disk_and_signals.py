"""Full disks, unwritable places and Ctrl-C leave nothing half-written; exit codes of real processes."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from edgeinfer.export.options import ExportConfig
from tests.cache import export_checkpoint, made
from tests.cli import (
    TIME_LIMIT,
    Child,
    command,
    contents,
    edgeinfer,
    environment,
    interruptible_environment,
    refuses,
    start,
)
from tests.factories import make_checkpoint, make_tokenizer
from tests.tables import each_row
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and limits of POSIX systems")

_ROWS = 1_500_000


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return made(make_endless) / "tiny"


def make_endless(folder: Path) -> None:
    make_checkpoint(folder / "tiny", "Llama", max_position_embeddings=2**20, eos_token_id=None)


@pytest.fixture(scope="module")
def good_bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_checkpoint(
        checkpoint, tmp_path_factory.mktemp("bundle") / "tiny", ExportConfig(bits=4, calibration="none")
    )


@pytest.fixture
def bundle(good_bundle: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good_bundle, tmp_path / "bundle")


@pytest.fixture(scope="module")
def vast_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose export takes seconds: a sparse file with a vocabulary of over a million tokens."""
    folder = tmp_path_factory.mktemp("checkpoint") / "vast"
    folder.mkdir()
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": _ROWS}), "utf-8")
    make_tokenizer(folder)
    data = (checkpoint / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, end = {}, 0
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        shape = (
            [_ROWS, entry["shape"][1]] if name in ("lm_head.weight", "model.embed_tokens.weight") else entry["shape"]
        )
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


def with_mount(folder: Path, options: str, script: str) -> subprocess.CompletedProcess[bytes]:
    """Run a shell script with a file system in memory at `folder`, or skip. The script gets the folder as $1 and
    edgeinfer as the rest of its arguments."""
    mount = f'mount -t tmpfs -o {options} none "$1" || exit 77; '
    namespace = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare(1) to mount a small file system")
    line = [*namespace, mount + script, "sh", str(folder), *command()]
    done = subprocess.run(line, env=environment(), capture_output=True, check=False, timeout=TIME_LIMIT)
    if done.returncode == 77 or done.stderr.startswith(b"unshare:"):
        pytest.skip(f"mounting is not allowed here: {done.stderr.decode().strip()}")
    return done


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_bundle(checkpoint: Path, good_bundle: Path, tmp_path: Path) -> None:
    script = (
        f'folder=$1; shift; cp -r {good_bundle} $folder/out; "$@" export {checkpoint} $folder/out --bits 32 --force;'
        ' code=$?; "$@" inspect $folder/out --verify >$folder/said 2>&1 || exit 99; rm $folder/said;'
        ' [ "$(ls -A $folder)" = out ] || exit 98; exit $code'
    )
    refuses(5, "The disk is full", with_mount(tmp_path, "size=600k", script))


@pytest.mark.parametrize(
    "blocks", [pytest.param(0, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.slow), 400]
)
def test_a_limit_on_file_sizes(checkpoint: Path, bundle: Path, tmp_path: Path, blocks: int) -> None:
    """A portable stand-in for the full disk, which strikes at different files; a block has 512 bytes."""
    before = contents(tmp_path)
    export = command("export", checkpoint, bundle, "--bits", "32", "--force")
    line = ["sh", "-c", 'ulimit -f "$1"; shift; exec "$@"', "sh", str(blocks), *export]
    done = subprocess.run(line, env=environment(), capture_output=True, check=False, timeout=TIME_LIMIT)
    refuses(5, "File too large", done)
    assert contents(tmp_path) == before


def test_a_place_under_a_file(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for place in ("file/out", "file/deep/out", "x" * 300):
        refuses(5, "Cannot write", edgeinfer("export", checkpoint, tmp_path / place))
    refuses(5, "already exists", edgeinfer("export", checkpoint, tmp_path / "file"))
    refuses(5, "is not a bundle", edgeinfer("export", checkpoint, tmp_path / "file", "--force"))
    assert contents(tmp_path) == {"file": b"mine"}


def test_a_directory_of_other_things_is_not_replaced(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.png").write_bytes(b"me")
    for force in ((), ("--force",)):
        refuses(5, "exists", edgeinfer("export", checkpoint, tmp_path / "photos", *force))
    assert contents(tmp_path) == {"photos": None, "photos/me.png": b"me"}


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [
        "run -n 2 -p Once -m",
        *(pytest.param(line, marks=pytest.mark.slow) for line in ("run --json -n 2 -p Once -m", "plan --json -m")),
        "inspect",
    ],
)
def test_output_to_a_full_disk(good_bundle: Path, arguments: str) -> None:
    with FULL.open("wb") as full:
        line = command(*arguments.split(), good_bundle)
        pipe = subprocess.PIPE
        done = subprocess.run(line, env=environment(), stdout=full, stderr=pipe, check=False, timeout=TIME_LIMIT)
    done.stdout = b""
    refuses(5, "The output cannot be written: No space left on device", done)


@pytest.mark.slow
@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_the_exit_code_survives_where_the_error_cannot_be_said(good_bundle: Path) -> None:
    with FULL.open("wb") as full:
        line = command("run", "-m", good_bundle, "-p", "")
        done = subprocess.run(line, env=environment(), stderr=full, check=False, timeout=TIME_LIMIT)
    assert done.returncode == 2


@pytest.mark.parametrize("replacing", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ctrl_c_while_exporting(vast_checkpoint: Path, bundle: Path, tmp_path: Path, replacing: bool) -> None:
    out = bundle if replacing else tmp_path / "out"
    before = contents(tmp_path)

    def has_begun() -> bool:
        assert process.poll() is None
        return any(path.stat().st_size for path in tmp_path.glob(f".{out.name}.*/new/weights.bin"))

    with start("export", vast_checkpoint, out, "--force", "--no-calibration") as process:
        wait_until(has_begun, "the file of weights")
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=TIME_LIMIT)
    assert process.returncode == 130
    assert said == (b"", b"")
    assert contents(tmp_path) == before


def test_ctrl_c_while_generating_keeps_what_was_written(good_bundle: Path) -> None:
    """190,000 tokens take minutes, so the reply ends because it is interrupted."""
    with start("run", "--raw", "-m", good_bundle, "-p", "Once", "-c", "200000", "-n", "190000") as process:
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 64)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=TIME_LIMIT)
    assert process.returncode == 130
    assert err == b"[stopped]\n"
    assert first.startswith(b"Once")
    assert (first + rest).endswith(b"\n")


@each_row("then", ["pass", "raise ImportError('initialization failed')"])
def test_ctrl_c_while_a_module_starts_that_loses_it(good_bundle: Path, tmp_path: Path, then: str) -> None:
    """As modules written in C do, onnxruntime's and numpy's."""
    path = tmp_path / "onnxruntime" / "__init__.py"
    path.parent.mkdir()
    path.write_text(f"""import signal, sys
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    {then}
sys.path.remove({str(tmp_path)!r})
del sys.modules["onnxruntime"]
import onnxruntime
""")
    paths = os.pathsep.join((str(tmp_path), environment()["PYTHONPATH"]))
    line = command("run", "-m", good_bundle, "-p", "Once", "-c", "200000", "-n", "190000")
    with Child(line, interruptible_environment() | {"PYTHONPATH": paths}) as process:
        out, err = process.communicate(timeout=TIME_LIMIT)
    assert (process.returncode, err) == (130, b"")
    assert len(out) < 1000


# It is interrupted when the import of a module begins: the first and the last of all, and one inside of another.
INTERRUPTED = """
import os, signal, sys, edgeinfer.apps.cli.main as main

def hear(event, arguments):
    if event == "import" and arguments[0] == sys.argv[1]:
        os.write(1, b"begun")
        signal.raise_signal(signal.SIGINT)

sys.addaudithook(hear)
sys.exit(main.main(["run", "-f", "-"]))
"""


@each_row("module", ["edgeinfer.apps.cli.options", "edgeinfer.core.options.load", "edgeinfer.apps.cli.options"])
def test_ctrl_c_while_commands_are_imported(module: str) -> None:
    line = [sys.executable, "-c", INTERRUPTED, module]
    with Child(line, interruptible_environment(), stdin=subprocess.PIPE) as process:
        # Its input stays open until it ends.
        assert process.wait(TIME_LIMIT) == 130
        assert process.communicate(timeout=TIME_LIMIT) == (b"begun", b"")


def test_ctrl_c_while_the_prompt_is_awaited_or_just_before(good_bundle: Path) -> None:
    """At any time after the command has started."""
    code = (
        "import os, sys, edgeinfer.apps.cli.main as main; build = main.build_parser; "
        "main.build_parser = lambda *only: (os.write(1, b'begun'), build(*only))[1]; "
        "sys.exit(main.main(['run', '-f', '-']))"
    )
    with Child([sys.executable, "-c", code], environment(), stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 5) == b"begun"
        process.send_signal(signal.SIGINT)
        assert process.wait(TIME_LIMIT) == 130
        assert process.communicate(timeout=TIME_LIMIT) == (b"", b"")
