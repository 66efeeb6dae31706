"""Text comes in and goes out whatever its encoding, and however the command was started."""

from __future__ import annotations

import codecs
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from edgeinfer.apps.cli.inputs import utf8
from edgeinfer.apps.cli.options import _schema
from edgeinfer.apps.cli.output import print_json
from edgeinfer.core.contexts import Context
from edgeinfer.core.errors import PromptError
from edgeinfer.core.user_files import decode_text
from edgeinfer.tools.batch import BatchInput
from tests.cli import TIME_LIMIT, command, environment
from tests.cli import edgeinfer as run
from tests.speculation import needs_builtin
from tests.tables import each_row
from tests.waiting import wait_until

TEXT = "Un café à 5 €: 日本 😀"
# As PowerShell's > and Out-File write files, and editors of Windows.
MARKED = {
    "utf-8-sig": TEXT.encode("utf-8-sig"),
    "utf-16-le": codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le"),
    "utf-16-be": codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"),
    "utf-32-le": codecs.BOM_UTF32_LE + TEXT.encode("utf-32-le"),
    "utf-32-be": codecs.BOM_UTF32_BE + TEXT.encode("utf-32-be"),
}


@each_row("data", [TEXT.encode(), *MARKED.values()])
def test_text_is_read_by_its_mark(data: bytes) -> None:
    assert decode_text(data, "it") == TEXT
    assert decode_text(b"", "it") == decode_text(codecs.BOM_UTF16_LE, "it") == ""


@each_row(
    "data, says",
    [
        ("café".encode("latin-1"), "it is not UTF-8 text (byte 3)"),
        ("5 €".encode("cp1252"), "it is not UTF-8 text (byte 2)"),
        ("Hello".encode("utf-16-le"), "may be UTF-16 without a byte order mark"),
        ("Hello".encode("utf-16-be"), "may be UTF-16 without a byte order mark"),
        ("Hello".encode("utf-32-le"), "may be UTF-16 without a byte order mark"),
        (codecs.BOM_UTF16_LE + b"a\0b", "it is not UTF-16 text"),
        (codecs.BOM_UTF16_LE + b"\0\xd8a\0", "it is not UTF-16 text"),
        (codecs.BOM_UTF8 + b"caf\xe9", "it is not UTF-8 text"),
    ],
)
def test_other_encodings_are_refused_in_words(data: bytes, says: str) -> None:
    with pytest.raises(PromptError) as refused:
        decode_text(data, "it")
    assert says in str(refused.value) and "iconv" in refused.value.hint


@each_row("data", list(MARKED.values()))
def test_every_file_that_is_text_may_be_marked(data: bytes, tmp_path: Path) -> None:
    encoding = next(name for name, marked in MARKED.items() if marked == data)
    mark = data[: len(data) - len(TEXT.encode(encoding.removesuffix("-sig")))]
    file = tmp_path / "file"

    def write(text: str) -> None:
        file.write_bytes(mark + text.encode(encoding.removesuffix("-sig")))

    write('{"enum": ["€"]}\r\n')
    assert json.loads(_schema(str(file))) == {"enum": ["€"]}
    write(TEXT)
    assert Context(file).text() == TEXT
    # The byte of a line's end is in the middle of these characters.
    write('{"prompt": "\u0a0a"}\r\n\r\n{"prompt": "€"}\n')
    batch = BatchInput.open(file)
    assert [line.error for line in batch.lines] == [None, None]
    assert [each["prompt"] for each in batch.read(batch.lines)] == ["\u0a0a", "€"]
    file.write_bytes(codecs.BOM_UTF16_LE + b"{")
    with pytest.raises(PromptError, match="is not UTF-16 text"):
        BatchInput.open(file)


def test_arguments_of_the_c_locale_are_text() -> None:
    # Where Python takes its arguments for ASCII.
    assert utf8(TEXT.encode().decode("ascii", "surrogateescape"), "The prompt") == utf8(TEXT, "") == TEXT
    with pytest.raises(PromptError, match="The prompt is not UTF-8 text"):
        utf8(b"caf\xe9".decode("ascii", "surrogateescape"), "The prompt")


@each_row("encoding", ["ascii", "latin-1", "cp1252", "cp437", "utf-8", "utf-16", "gb18030", "shift_jis"])
def test_objects_lose_no_text_in_any_encoding(encoding: str) -> None:
    data = {"text": TEXT, "half": "\ud800", "name": "é"}
    out = io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding, errors="replace"))
        print_json(data)
        assert json.loads(out.getvalue().decode(encoding)) == data


@needs_builtin
def test_a_prompt_of_powershell_is_read(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(MARKED["utf-16-le"])
    words = ("run", "--raw", "-n", "1", "-c", "64", "-t", "1", "-f")
    for done in (run(*words, file), run(*words, "-", stdin=MARKED["utf-16-be"])):
        assert done.returncode == 0 and done.stdout.decode().startswith(TEXT)
    done = run(*words, "-", stdin=TEXT.encode("utf-16-le"))
    assert done.returncode == 2 and b"UTF-16 without a byte order mark" in done.stderr


BARE = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
C_LOCALE = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
# Variables, and the encoding of what is written.
STARTS: dict[str, tuple[dict[str, str], str]] = {
    "ascii": ({**os.environ, "PYTHONIOENCODING": "ascii"}, "ascii"),
    "latin-1": ({**os.environ, "PYTHONIOENCODING": "latin-1"}, "latin-1"),
    "cp1252": ({**os.environ, "PYTHONIOENCODING": "cp1252:strict"}, "cp1252"),
    "C locale": ({**os.environ, **C_LOCALE}, "ascii"),
    "POSIX locale": ({**os.environ, "LC_ALL": "POSIX"}, "utf-8"),
    "as cron": ({**BARE, "SHELL": "/bin/sh"}, "utf-8"),
    "no home": ({**BARE, "HOME": "/nonexistent", **C_LOCALE}, "ascii"),
    "no terminal": ({**os.environ, "TERM": "dumb", "COLUMNS": "-3", "LINES": "x"}, "utf-8"),
}


@needs_builtin
@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="locales of POSIX systems")
@pytest.mark.parametrize("start", STARTS)
def test_the_command_runs_in_every_environment(start: str, tmp_path: Path) -> None:
    variables, encoding = STARTS[start]
    env = variables | {name: environment()[name] for name in ("PYTHONPATH", "HF_HUB_OFFLINE")}
    gone = tmp_path / "gone"
    gone.mkdir()
    words = command("run", "-n", "2", "-c", "64", "-t", "1", "--raw", TEXT)
    for more, folder in (((), tmp_path), (("--json",), tmp_path), (("--json",), gone)):
        line = [*words, *more]
        if folder is gone:
            line = ["sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", *line]
        done = subprocess.run(line, env=env, cwd=folder, capture_output=True, timeout=TIME_LIMIT)
        assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
        said = done.stdout.decode(encoding)
        if more:
            assert json.loads(said)["finish_reason"] in ("stop", "length")
        else:
            assert said.startswith(TEXT.encode(encoding, "replace").decode(encoding))
    done = subprocess.run(command("run", "-m", "模型/€", "x"), env=env, capture_output=True, timeout=TIME_LIMIT)
    assert done.returncode == 3 and done.stderr.startswith(b"error: ") and done.stderr.count(b"\n") == 1


SLOW = ["<&- >&-", ">&- 2>&-", "<&- >&- 2>&-", "< /dev/null", "> /dev/full"]


@needs_builtin
@pytest.mark.skipif(sys.platform == "win32", reason="shells of POSIX systems")
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", *(pytest.param(row, marks=pytest.mark.slow) for row in SLOW)])
def test_streams_that_are_closed(closed: str) -> None:
    line = ["sh", "-c", f'"$@" {closed}', "sh", *command("run", "-n", "2", "-c", "64", "-t", "1", "Once")]
    done = subprocess.run(line, env=environment(), capture_output=True, timeout=TIME_LIMIT)
    assert done.returncode == (5 if "full" in closed else 0) and b"Traceback" not in done.stderr, done.stderr
    assert bool(done.stdout) == (">&-" not in closed.replace("2>&-", "") and "full" not in closed)


@needs_builtin
@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="pipes and signals of POSIX systems")
def test_a_server_whose_output_nothing_reads_serves() -> None:
    reader, writer = os.pipe()
    words = command("serve", "--port", "0", "-c", "64", "-t", "1")
    with subprocess.Popen(words, env=environment(), stdout=writer, stderr=subprocess.PIPE) as process:
        os.close(reader)
        os.close(writer)

        def ready() -> bool:
            ports = [each.laddr.port for each in psutil.Process(process.pid).net_connections("tcp")]
            return (
                bool(ports) and httpx.get(f"http://127.0.0.1:{ports[0]}/health", timeout=TIME_LIMIT).status_code == 200
            )

        wait_until(ready, "a server that is ready")
        wait_until(ready, "a server that still is")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=TIME_LIMIT)
        assert process.returncode == 0 and b"BrokenPipe" not in errors, errors
