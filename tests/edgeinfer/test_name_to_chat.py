"""From a name to a reply in one command, against a hub on this machine: killed, cancelled, offline, without room."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cache import made
from tests.cli import TIME_LIMIT, command, environment
from tests.gguf_builder import STRING, small_model
from tests.hub_server import COMMIT, Hub, hub_environment, serving
from tests.tables import each_row
from tests.tools.random_models import Shape, write_random_checkpoint
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

# Two of the pieces of 10 MB in which the hub's library writes, and a little.
SHAPE = Shape("small", "llama", 256, 2, 4, 2, 64, 256, 24_000, 500, 256, 1e4, 1e-5)
STALL_AT = 21_000_000
# Models that lack tensors, so that nothing is prepared.
GGUFS = {
    f"toy-{kind}.gguf": small_model(general__name=(STRING, "x" * size)).build()
    for kind, size in (("Q2_K", 10), ("Q4_K_M", 200), ("BF16", 900))
}
BUNDLE = f"org--model/auto-{COMMIT[:12]}"
# Without calibration, which takes most of the time.
PULL = ("pull", "--no-calibration")
CONVERT = "import sys; from edgeinfer.tools import conversion; sys.exit(conversion.main(sys.argv[1]))"


def make(folder: Path) -> None:
    write_random_checkpoint(folder, SHAPE)


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return made(make)


@pytest.fixture(scope="module")
def files(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.iterdir()}


@dataclass(frozen=True)
class User:
    """Somebody with a hub and a home folder of their own."""

    home: Path
    hub: Hub

    def environment(self, **more: str) -> dict[str, str]:
        return environment() | hub_environment(self.hub.url, self.home) | more

    def run(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*arguments),
            env=self.environment(**more),
            capture_output=True,
            text=True,
            check=False,
            timeout=TIME_LIMIT,
            stdin=subprocess.DEVNULL,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command(*arguments),
            env=self.environment(),
            stdout=pipe,
            stderr=pipe,
            text=True,
            stdin=subprocess.DEVNULL,
            # A background process of a shell ignores Ctrl-C; this one must not.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
        )

    def written(self) -> set[str]:
        """What is in the folder of models, files of bundles left out."""
        folder = self.home / "data" / "edgeinfer" / "models"
        paths = [path for path in folder.glob("*/*") if path.parent.name != ".locks"]
        return {path.relative_to(folder).as_posix() for path in paths}


@pytest.fixture
def user(tmp_path: Path, files: dict[str, bytes]) -> Iterator[User]:
    with serving({"org/model": files, "org/gguf": GGUFS}) as hub:
        yield User(tmp_path, hub)


def kill(process: subprocess.Popen[str]) -> None:
    """Kills a command as the system would, and waits for what it had started to be gone by itself."""
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=TIME_LIMIT)
    gone, alive = psutil.wait_procs(children, TIME_LIMIT)
    assert alive == [] and gone


def test_one_command_answers_and_the_next_needs_no_hub(user: User) -> None:
    done = user.run("run", "-m", "org/model", "--no-calibration", "Hello", "-n", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "Downloading org/model (27." in done.stderr
    assert done.stderr.count("Converting org/model to the bits that it needs, once") == 1
    assert user.written() == {"org--model/source.json", BUNDLE}
    served = len(user.hub.served)
    again = user.run("run", "-m", "org/model", "Hello", "-n", "4", HF_HUB_OFFLINE="1")
    assert (again.returncode, again.stdout) == (0, done.stdout), again.stderr
    assert "Converting" not in again.stderr
    assert len(user.hub.served) == served
    listed = json.loads(user.run("models", "--json").stdout)["models"]
    assert [model["name"] for model in listed] == ["tales", "org/model"]
    assert listed[1]["last_used"] and listed[1]["memory"] and listed[1]["source_bytes"] > 27_000_000
    removed = user.run("models", "rm", "-y", "org/model")
    assert removed.returncode == 0, removed.stderr
    assert user.written() == set()
    assert not list((user.home / "hf").rglob("*.safetensors"))


def test_a_download_that_was_killed_goes_on_where_it_was(user: User, files: dict[str, bytes]) -> None:
    user.hub.stall_at = STALL_AT
    process = user.start(*PULL, "org/model")
    assert user.hub.stalled.wait(TIME_LIMIT)
    # What was sent is written some time later.
    wait_until(lambda: largest_unfinished(user.home) >= 10_000_000, "the first piece on disk")
    kill(process)
    assert user.written() == set()
    user.hub.stall_at, user.hub.sent = None, 0
    user.hub.go_on.set()
    done = user.run(*PULL, "org/model")
    assert done.returncode == 0, done.stderr
    assert user.hub.sent < len(files["model.safetensors"]) - 9_000_000
    assert user.written() == {"org--model/source.json", BUNDLE}


def largest_unfinished(home: Path) -> int:
    return max((path.stat().st_size for path in (home / "hf").rglob("*.edgeinfer.incomplete")), default=0)


def test_a_conversion_that_was_killed_begins_again_and_leaves_nothing(user: User) -> None:
    process = user.start("pull", "org/model")
    wait_until(lambda: any(".work-" in path for path in user.written()), "the conversion")
    converting = psutil.Process(process.pid).children()
    # Both at once, as by a power cut: whoever would clean up is gone.
    process.send_signal(signal.SIGSTOP)
    for each in converting:
        each.kill()
    kill(process)
    assert BUNDLE not in user.written()
    served = len(user.hub.served)
    done = user.run(*PULL, "org/model")
    assert done.returncode == 0, done.stderr
    assert user.written() == {"org--model/source.json", BUNDLE}
    assert len(user.hub.served) == served


@pytest.mark.parametrize("stage", ["download", "conversion"])
def test_ctrl_c_ends_it_at_once_and_leaves_nothing(user: User, stage: str) -> None:
    user.hub.stall_at = STALL_AT if stage == "download" else None
    process = user.start("pull", "org/model")
    if stage == "download":
        assert user.hub.stalled.wait(TIME_LIMIT)
    else:
        wait_until(lambda: any(".work-" in path for path in user.written()), "the conversion")
    children = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=TIME_LIMIT)
    assert process.returncode == 130
    assert not any(child.is_running() for child in children)
    assert user.written() <= {"org--model/source.json"}


# A folder that is not there yet when its name is reported, while the caller goes away.
SLOWLY_MADE = """
import tempfile, threading
def mkdtemp(*place, make=tempfile.mkdtemp, **named):
    folder = make(*place, **named)
    if "/.work-" not in folder:
        return folder
    print(folder, flush=True)
    threading.Event().wait(1)
    return folder
tempfile.mkdtemp = mkdtemp
"""


def test_a_folder_goes_whose_making_was_interrupted(user: User) -> None:
    line = [sys.executable, "-c", f"{SLOWLY_MADE}\n{CONVERT}", json.dumps({"name": "org/model"})]
    process = subprocess.Popen(line, env=user.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None and process.stdin is not None
        folder = next(Path(line.rstrip()) for line in process.stdout if line.startswith("/"))
        process.stdin.close()
        process.wait(TIME_LIMIT)
    assert process.returncode == 1
    assert folder.parent.is_dir() and not folder.exists()


def converting(user: User, prelude: str, **job: Any) -> list[dict[str, Any]]:
    """What the program that converts tells, after some code that changes the world it is in."""
    line = [sys.executable, "-c", f"{prelude}\n{CONVERT}", json.dumps({"name": "org/model", **job})]
    process = subprocess.Popen(line, env=user.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    # Its input stays open until it has ended, as whoever asked would keep it.
    with process:
        assert process.stdout is not None
        return [json.loads(line) for line in process.stdout]


def test_the_default_installation_suffices(user: User) -> None:
    absent = "torch", "transformers", "safetensors", "llama_cpp", "gguf", "starlette", "llguidance"
    said = converting(user, f"import sys; sys.modules |= dict.fromkeys({absent})")
    assert Path(said[-1]["path"]).parts[-2:] == tuple(BUNDLE.split("/")), said
    assert {step["stage"].split()[0] for step in said if "stage" in step} == {"Downloading", "Converting"}


@each_row(
    ("prelude", "says"),
    [
        ("import shutil; shutil.disk_usage = lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10**6)", "of disk space"),
        ("import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))", "disk is full"),
    ],
)
def test_a_full_disk(user: User, prelude: str, says: str) -> None:
    said = converting(user, prelude)
    assert said[-1]["error"]["kind"] == "StorageError"
    assert says in said[-1]["error"]["message"]
    if says == "of disk space":
        for number in ("27.7 MB to download", "converted", "1.0 MB"):
            assert number in said[-1]["error"]["message"]
        assert "model.safetensors" not in user.hub.served
    assert user.written() <= {"org--model/source.json"}


def test_who_is_offline_is_told_so_and_who_is_not_is_not(user: User) -> None:
    for arguments, more, says in (
        (["org/model"], {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        (["org/model"], {"HF_ENDPOINT": "http://127.0.0.1:9"}, "You are offline or the hub cannot be reached"),
        (["org/absent"], {}, "There is no org/absent on the hub"),
        (["org/broken"], {}, "The hub answered 500"),
        (["qwen3"], {}, "Did you mean qwen3-0.6b"),
        (["cov/llama.gguf"], {}, "No such file: cov/llama.gguf."),
        (["org/gguf:Q5_K_M"], {}, "has no GGUF file named like 'Q5_K_M'"),
    ):
        done = user.run("run", "-m", *arguments, "-p", "Hello", **more)
        assert (done.returncode, done.stderr.count("\n")) == (3, 1), done.stderr
        assert says in done.stderr
        assert "offline" not in done.stderr or more
        assert "edgeinfer run" not in done.stderr


def test_two_at_once_convert_once(user: User) -> None:
    processes = [user.start(*PULL, "org/model") for _ in range(2)]
    done = [process.communicate(timeout=TIME_LIMIT) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], done
    assert done[0][0] == done[1][0]
    assert sum("Converting" in errors for _, errors in done) == 1
    assert user.hub.served.count("model.safetensors") == 1
    assert user.written() == {"org--model/source.json", BUNDLE}


CANCEL = """
import edgeinfer, sys
from pathlib import Path
try:
    edgeinfer.pull("org/model", cancelled=Path(sys.argv[1]).exists, progress=lambda *step: None)
except edgeinfer.HubError as error:
    print(error)
"""


def test_python_cancels(user: User) -> None:
    user.hub.stall_at = STALL_AT
    sign = user.home / "stop"
    line = [sys.executable, "-c", CANCEL, str(sign)]
    process = subprocess.Popen(line, env=user.environment(), stdout=subprocess.PIPE, text=True)
    assert user.hub.stalled.wait(TIME_LIMIT)
    sign.touch()
    out, _ = process.communicate(timeout=TIME_LIMIT)
    assert out == "Fetching org/model was cancelled. Try again to resume; what was downloaded is kept.\n"
    assert user.written() == set()


def test_a_directory_is_converted_once_and_again_when_it_changes(user: User, checkpoint: Path) -> None:
    folder = user.home / "mine"
    folder.mkdir()
    for path in checkpoint.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    assert user.run(*PULL, str(folder), "--bits", "8").returncode == 0
    first = user.written()
    assert any("/8-bit-" in path for path in first)
    assert "Converting" not in user.run("run", "-m", str(folder), "Hello", "-n", "2").stderr
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert "Converting" in user.run(*PULL, str(folder), "--bits", "8").stderr
    assert len(user.written()) == len(first) and user.written() != first
    assert user.hub.served == []


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_is_asked_which_type_and_a_pipe_is_told(user: User) -> None:
    pytest.importorskip("llama_cpp")
    done = user.run("pull", "org/gguf")
    assert done.returncode == 0, done.stderr
    assert "Taking org/gguf:Q4_K_M" in done.stderr
    assert user.hub.served == ["toy-Q4_K_M.gguf"]
    assert "Run it: edgeinfer chat -m org/gguf\n" in done.stderr, "the type that was taken is found again by the name"
    shown = on_terminal(user, "pull", "org/gguf", answers=lambda text: b"Q2_K\n" if "Which one?" in text else None)
    assert "recommended" in shown
    assert user.hub.served[1:] == ["toy-Q2_K.gguf"]


def on_terminal(user: User, *arguments: str, answers: Callable[[str], bytes | None]) -> str:
    """What a command shows on a terminal, on which the first answer there is to what it shows is typed."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        command(*arguments), env=user.environment(), stdin=follower, stdout=follower, stderr=follower
    )
    os.close(follower)
    shown, answered = "", False
    while True:
        try:
            data = os.read(leader, 4096)
        except OSError:  # how Linux says that the other side has closed
            break
        if not data:
            break
        shown += data.decode("utf-8", "replace")
        if not answered and (answer := answers(shown)) is not None:
            os.write(leader, answer)
            answered = True
    os.close(leader)
    assert process.wait(TIME_LIMIT) == 0, shown
    return shown
