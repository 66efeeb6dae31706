"""`edgeinfer run`: what reaches the model, stdout, stderr and the exit code."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

import edgeinfer
from edgeinfer.apps.cli.main import COMMANDS, main
from edgeinfer.apps.cli.output import print_json
from edgeinfer.core.errors import BackendError, BudgetError, BundleError, PromptError
from edgeinfer.core.results import ModelInfo
from tests.cli import TIME_LIMIT, command, environment, handling, refuses, start
from tests.cli import edgeinfer as run
from tests.fakes import FakeStream
from tests.recorded import check_recorded
from tests.speculation import needs_builtin
from tests.tables import each_row

ROOT = Path(__file__).resolve().parents[3]
WORDS = ("Once", " upon", " a", " time")


@dataclass
class FakeModel:
    """Records what it is asked."""

    fails: BaseException | None = None
    interrupt_after: int | None = None
    loaded: tuple[Any, dict[str, Any]] | None = None
    prompts: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    systems: list[str | None] = field(default_factory=list)
    streams: list[FakeStream] = field(default_factory=list)
    closed: bool = False
    chat_template_text: str | None = None
    context: int = 2048
    info: ModelInfo = field(default_factory=lambda: ModelInfo("toy", "llama", 64, 4.5, "onnx", "portable"))

    def load(self, model: Any = None, **options: Any) -> Self:
        self.loaded = (model, options)
        self.context = options.get("context", self.context)
        return self

    def tokenize(self, text: str) -> list[int]:
        return [7] * len(text.split())

    def close(self) -> None:
        self.closed = True

    def chat(self, system: str | None = None) -> Self:
        self.systems.append(system)
        return self

    def stream(self, prompt: str, **options: Any) -> FakeStream:
        if self.fails is not None:
            raise self.fails
        self.prompts.append((prompt, options))
        self.streams.append(FakeStream(WORDS, self.interrupt_after))
        return self.streams[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModel]:
    model = FakeModel()
    monkeypatch.setattr(edgeinfer, "load", model.load, raising=False)
    monkeypatch.setattr("edgeinfer.hub.resolve", lambda model, **_: Path(model))
    with handling(signal.SIGINT):
        yield model


def test_text_goes_to_stdout_and_its_end_to_stderr(model: FakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-p", "Hi"]) == 0
    assert capsys.readouterr() == ("HiOnce upon a time\n", "[context full; -c for more]\n")
    assert model.loaded == (None, {})
    assert model.prompts == [("Hi", {"max_tokens": 128})]
    assert model.closed
    assert model.streams[0].closed


def test_verbose_adds_a_summary(model: FakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-p", "Hi", "-v"]) == 0
    shown = capsys.readouterr().err
    assert "\n4 tokens, 250.0 tok/s, first token after 12 ms, peak memory 2.0 MB, context 2048 tokens\n" in shown
    check_recorded("cli-run", shown.splitlines())


@each_row(
    ("words", "options", "longest", "plan", "context"),
    [
        (3000, "", 32768, (True, 10**6), 3000 + 1024 + 128),
        (3000, "-n 5", 32768, (True, 10**6), 3000 + 5 + 128),
        (3000, "", 4096, (True, 10**6), 4096),
        (3000, "", 2048, (True, 10**6), None),  # no longer than it is
        (3000, "--memory 1GB", 32768, (False, 10**6), None),  # no room: what is planned by default
        (3000, "", 32768, (True, 10**15), None),
        (3000, "-c 2048", 32768, (True, 10**6), 2048),  # what was asked for stays
        (300, "", 32768, (True, 10**6), None),
    ],
)
def test_a_long_prompt_has_a_context_that_holds_it_and_its_reply(
    model: FakeModel,
    monkeypatch: pytest.MonkeyPatch,
    words: int,
    options: str,
    longest: int,
    plan: tuple[bool, int],
    context: int | None,
) -> None:
    model.context = 2048
    planned = SimpleNamespace(fits=plan[0], planned_bytes=plan[1])
    monkeypatch.setattr(edgeinfer, "plan", lambda model, **options: planned, raising=False)
    monkeypatch.setattr(edgeinfer, "describe", lambda model: SimpleNamespace(context=longest), raising=False)
    assert main(["run", "-p", "a " * words, *options.split()]) == 0
    assert model.loaded is not None and model.loaded[1].get("context") == context


def test_options_reach_the_model(model: FakeModel) -> None:
    line = (
        "run -m some/dir -p Hi -n 7 -c 512 -t 3 --memory 600MB --temperature 0.7 --top-k 5 --top-p 0.9 --min-p 0.1"
        " --repetition-penalty 1.1 --frequency-penalty 0.2 --presence-penalty 0.3 --seed 1 --stop END --stop ."
        " --no-exact --backend reference --speculation copy,model --draft-model small --draft-max 9 --no-remember"
        " --verification rejection --draft-width 2 --choice yes --choice no"
    )
    assert main(line.split()) == 0
    loading = {"memory": 600_000_000, "context": 512, "threads": 3, "exact": False, "backend": "reference"}
    loading |= {"speculation": "copy,model", "draft_model": "small", "draft_max": 9, "remember": False}
    assert model.loaded == ("some/dir", loading)
    assert model.prompts[0][1] == {
        "max_tokens": 7,
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "seed": 1,
        "stop": ("END", "."),
        "speculation": "copy,model",
        "draft_max": 9,
        "verification": "rejection",
        "draft_width": 2,
        "choices": ("yes", "no"),
    }


def test_the_template_is_applied_where_there_is_one(model: FakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    for options, asked in (([], 128), (["--system", "x"], None)):
        assert main(["run", "-p", "Hi", *options]) == (0 if asked else 3)
    assert (model.systems, [options["max_tokens"] for _, options in model.prompts]) == ([], [128])
    assert "toy has no chat template, which --system needs. Leave it out" in capsys.readouterr().err
    model.chat_template_text = "{{ messages }}"
    for options, system in (([], None), (["--system", "Be brief."], "Be brief.")):
        assert main(["run", "Hi", *options]) == 0
        assert model.systems.pop() == system
        assert model.prompts.pop() == ("Hi", {"max_tokens": 1024})
    assert capsys.readouterr().out == 2 * "Once upon a time\n"
    assert main(["run", "--raw", "Hi"]) == 0
    assert model.systems == []
    assert capsys.readouterr().out == "HiOnce upon a time\n"


def test_json_is_the_only_output(model: FakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-p", "Hi", "--json"]) == 0
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert data["text"] == "Once upon a time"
    assert data["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9, "reasoning_tokens": 0}
    assert err == ""
    check_recorded("cli-run-json", data)


def test_ctrl_c_stops_the_reply(model: FakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    model.interrupt_after = 2
    handler = signal.getsignal(signal.SIGINT)
    assert main(["run", "-p", "Hi"]) == 130
    assert capsys.readouterr().out == "HiOnce upon\n"
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_with_json_still_prints_the_result(model: FakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    model.interrupt_after = 2
    assert main(["run", "-p", "Hi", "--json"]) == 130
    data = json.loads(capsys.readouterr().out)
    assert (data["text"], data["finish_reason"]) == ("Once upon", "cancelled")


def test_prompt_from_a_file(model: FakeModel, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("\ufeffZwölf\n\n".encode())
    assert main(["run", "-f", str(file)]) == 0
    assert model.prompts[0][0] == "Zwölf\n"


def test_what_is_piped_in_is_the_prompt_or_stands_behind_it(model: FakeModel, tmp_path: Path) -> None:
    file, schema = tmp_path / "file.txt", '{"type": "object"}'
    file.write_text("From a file.")
    for line, piped, prompt in (
        (["Hi"], b"", "Hi"),
        ([], b"Hi\n", "Hi"),
        (["Sum up:"], b"One\n\nTwo\n", "Sum up:\n\nOne\n\nTwo"),
        (["-p", "Sum up:"], b"Notes\n", "Sum up:\n\nNotes"),
        (["-p", "Sum up:", "-f", str(file)], b"Notes", "Sum up:\n\nFrom a file.\n\nNotes"),
        (["-p", "Sum up:", "-f", "-"], b"Notes", "Sum up:\n\nNotes"),
        (["Who?", "--json-schema", "-"], schema.encode(), "Who?"),
    ):
        assert run("run", *line, stdin=piped).returncode == 0
        assert model.prompts.pop()[0] == prompt
    refuses(2, "There is no prompt.", run("run"))
    refuses(2, "stdin can be read only once.", run("run", "-f", "-", "--grammar", "-", stdin=b"x"))
    refuses(2, "Did you mean: edgeinfer run -m qwen3-0.6b", run("run", "qwen3-0.6b"))


def test_forms_of_replies_come_from_files(model: FakeModel, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "integer"}')
    (tmp_path / "choices.txt").write_text("red\n\ngreen grey\n")
    (tmp_path / "yes.lark").write_text('start: "yes"')
    for line, options in (
        (["--json-schema", str(tmp_path / "schema.json")], {"json_schema": '{"type": "integer"}'}),
        (["--json-schema", '{"type": "null"}'], {"json_schema": '{"type": "null"}'}),
        (["--choices", str(tmp_path / "choices.txt"), "--choice", "x"], {"choices": ("x", "red", "green grey")}),
        (["--grammar", str(tmp_path / "yes.lark")], {"grammar": 'start: "yes"'}),
        (["--regex", "a+"], {"regex": "a+"}),
        (["--json-object", "--ignore-eos"], {"json_object": True, "ignore_eos": True}),
        (["--logit-bias", "4=1", "--logit-bias", "5=-2.5"], {"logit_bias": {4: 1.0, 5: -2.5}}),
        (["--stop-token-ids", "4,5"], {"stop_token_ids": (4, 5)}),
    ):
        assert main(["run", "Hi", *line]) == 0
        assert model.prompts.pop()[1] == options | {"max_tokens": 128}
    for wrong in (["--json-schema", "missing"], ["--stop-token-ids", "a"], ["--logit-bias", "4"], ["--choices", "no"]):
        assert main(["run", "Hi", *wrong]) == 2


@each_row(
    "arguments",
    [
        ["run"],
        ["run", "-p", "Hi", "-f", "does-not-exist.txt"],
        ["run", "-p", "Hi", "--memory", "lots"],
        ["run", "-p", "Hi", "--temperature", "-1"],
        ["run", "-p", "Hi", "--stop", ""],
        ["run", "-p", "Hi", "--speculation", "nonsense"],
        ["run", "-p", "Hi", "--draft-max", "0"],
        ["run", "-p", "\udcff"],
        ["run", "-p", "Hi", "--system", "\udcff"],
        ["run", "-p", "Hi", "--stop", "\udcff"],
        ["run", "-p", "Hi", "--choice", "\udcff"],
        ["run", "-f", "does-not-exist.txt"],
        ["run", "-f", str(ROOT)],
        ["walk"],
        ["--memory", "1GB"],
        ["run", "Hi", "-p", "Hi"],
        ["run", "Hi", "you"],
        ["run", "Hi", "--raw", "--system", "x"],
    ],
)
def test_bad_usage_is_one_line_and_2(
    model: FakeModel, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    """Ranges of options themselves are those of tests/edgeinfer/test_options.py."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert model.loaded is None


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (PromptError("The prompt is empty.", "Give some text."), 2),
        (BundleError("weights.bin is missing.", "Export it again."), 3),
        (BudgetError("Needs 2 GB.", "Allow more."), 4),
        (BackendError("The engine failed."), 5),
        (ValueError("odd\nvalue"), 5),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_exit_codes(model: FakeModel, capsys: pytest.CaptureFixture[str], failure: BaseException, code: int) -> None:
    model.fails = failure
    assert main(["run", "-p", "Hi"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == (0 if code == 130 else 1)
    if isinstance(failure, ValueError):
        assert err == "error: unexpected ValueError: odd value. Run again with --debug for the traceback.\n"
    assert model.closed


def test_debug_shows_the_traceback(model: FakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    model.fails = ValueError("odd")
    assert main(["run", "-p", "Hi", "--debug"]) == 5
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"edgeinfer {edgeinfer.__version__}\n"


@each_row("command", COMMANDS)
def test_every_command_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"  edgeinfer {command}" in capsys.readouterr().out


def test_json_is_written_as_people_read_it(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"text": "naïve 猫"})
    assert '"text": "naïve 猫"' in capsys.readouterr().out


def test_garbage_is_looked_for_once_the_prompt_is_read(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the process is the command's own, which says so by leaving the arguments to it."""
    seen: list[bool] = []
    stream = model.stream

    def streamed(prompt: str, **options: Any) -> FakeStream:
        seen.append(gc.isenabled())
        return stream(prompt, **options)

    monkeypatch.setattr(model, "stream", streamed)
    monkeypatch.setattr(sys, "argv", ["edgeinfer", "run", "--raw", "-p", "Once"])
    assert main() == main(["run", "-p", "Once"]) == 0
    assert seen == [False, True] and gc.isenabled()


@pytest.mark.slow
def test_a_pipe_that_stays_silent_is_named() -> None:
    with start("run", "-p", "Hi", "-c", "0x", stdin=subprocess.PIPE) as process:  # refused before it is read
        assert process.wait(TIME_LIMIT) == 2
    with start("run", "-m", "no-such-model", "-p", "Hi", stdin=subprocess.PIPE) as process:
        assert process.stderr is not None and process.stdin is not None
        assert process.stderr.readline().startswith(b"Reading more of the prompt from stdin")
        process.stdin.close()
        assert process.wait(TIME_LIMIT) == 3


def test_the_package_runs_as_a_module() -> None:
    line = [sys.executable, "-m", "edgeinfer", "run", "--context", "no"]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, check=False, timeout=TIME_LIMIT)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--context" in done.stderr


def test_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            command("run", "--help"), env=environment(), stdout=writer, stderr=subprocess.PIPE, timeout=TIME_LIMIT
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@needs_builtin
def test_builtin_model_in_too_small_a_budget() -> None:
    refuses(4, "MB", run("run", "-p", "Once upon a time", "--memory", "1MB"))


@pytest.mark.slow
@needs_builtin
def test_context_files_are_read_before_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = [tmp_path / f"{name}.txt" for name in ("dog", "cat")]
    for file in files:
        file.write_text(f"Tom had a {file.stem}. It was very old.", "utf-8")
    given = [part for file in files for part in ("--context-file", str(file))]
    evaluated = []
    for _ in range(2):
        result = run("run", "--raw", *given, "-p", "One day,", "-n", "4", "--json")
        assert result.returncode == 0, result.stderr
        contexts = json.loads(result.stdout)["contexts"]
        assert contexts["contexts"] == 2
        assert not contexts["lossless"]
        evaluated.append(contexts["evaluated"])
    assert evaluated[0] > evaluated[1] == 0
    refuses(2, "is not a file", run("run", "--context-file", str(tmp_path / "none"), "-p", "One day,"))
