"""`edgeinfer batch`: every request is answered once and in order, whatever its line contains, however often it is
killed."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.runtime.native.library import LIBRARY
from tests.apps.cli.test_disk_and_signals import with_mount
from tests.cli import edgeinfer as run
from tests.cli import refuses, start
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not LIBRARY.is_file(), reason="the native kernel was not built")
STORY = "Once upon a time there was a little dog who lived in a big house by the sea. "
SMALL = ("-c", "192", "-t", "1")


def write_lines(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines), "utf-8")
    return path


def replies(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def has_lines(path: Path, count: int) -> bool:
    """Whether a file has more than `count` lines."""
    return path.exists() and path.read_bytes().count(b"\n") > count


def said(reply: dict[str, Any]) -> tuple[str, str, str]:
    """A reply without what differs between runs."""
    (choice,) = reply["response"]["body"]["choices"]
    return reply["custom_id"], choice["text"], choice["finish_reason"]


def test_every_line_has_its_answer_in_the_order_of_the_requests(tmp_path: Path) -> None:
    body = {"prompt": STORY, "max_tokens": 5, "n": 2, "temperature": 0.9, "seed": 4, "model": "gpt-4o"}
    lines: list[dict[str, Any] | str] = [
        {"custom_id": "z", "method": "POST", "url": "/v1/completions", "body": body},
        {"messages": [{"role": "user", "content": "A story about Tom"}], "max_completion_tokens": 4},
        '{"prompt": "Tom',
        {"custom_id": "unknown", "prompt": "Tom", "temprature": 1},
        {"custom_id": "long", "prompt": STORY * 30},
        "",
        {"custom_id": "beam", "prompt": "The cat", "search": "beam"},
        {"prompt": "The cat saw", "temperature": 0.9},
        {"custom_id": "elsewhere", "method": "POST", "url": "/v1/embeddings", "body": {"input": "Tom"}},
    ]
    requests, output = write_lines(tmp_path / "requests.jsonl", *lines), tmp_path / "replies.jsonl"
    done = run("batch", requests, "-o", output, "-n", "6", "--json", *SMALL)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout).items() >= {"requests": 8, "failed": 4, "resumed": 0}.items()
    assert b"Line 3: The line is not JSON: Unterminated string" in done.stderr
    first, chat, damaged, unknown, long, beam, sampled, elsewhere = replies(output)
    names = ["z", "line-2", None, "unknown", "long", "beam", "line-8", "elsewhere"]
    assert [each["custom_id"] for each in replies(output)] == names
    with edgeinfer.load(context=192, threads=1) as model:
        drawn = [model.generate(STORY, max_tokens=5, temperature=0.9, seed=seed).text for seed in (4, 5)]
        assert [choice["text"] for choice in first["response"]["body"]["choices"]] == drawn
        found = model.generate("The cat", max_tokens=6, search="beam").text
        assert beam["response"]["body"]["choices"][0]["text"] == found
    assert chat["response"]["body"]["object"] == "chat.completion"
    assert chat["response"]["body"]["usage"]["completion_tokens"] == 4
    assert damaged["response"] is None and damaged["error"]["line"] == 3
    assert (unknown["response"]["status_code"], unknown["response"]["body"]["error"]["param"]) == (400, "temprature")
    assert long["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert sampled["response"]["body"]["usage"]["completion_tokens"] == 6
    assert elsewhere["error"]["param"] == "url"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["replies.jsonl", "requests.jsonl"]
    # A request without a seed draws by its name, and says the same again.
    assert run("batch", requests, "-o", output, "-n", "6", "--force", "--parallel", "1", *SMALL).returncode == 0
    assert replies(output)[6]["response"]["body"]["choices"] == sampled["response"]["body"]["choices"]


def test_a_run_goes_on_behind_the_last_whole_line(tmp_path: Path) -> None:
    lines = [{"custom_id": name, "prompt": f"{name} had", "max_tokens": 4} for name in ("Tom", "Lily", "Sam")]
    requests, output = write_lines(tmp_path / "requests.jsonl", *lines), tmp_path / "replies.jsonl"
    unfinished = tmp_path / "replies.jsonl.partial"
    assert run("batch", requests, "-o", output, *SMALL).returncode == 0
    whole = replies(output)
    kept = {"line": 2, "failed": False, "reply": whole[1] | {"kept": True}}
    # An unfinished run gives the head.
    with edgeinfer.load(context=192, threads=1) as model:
        from edgeinfer.tools.batch import BatchInput, answer_batch

        def stop(stage: str, done: int, total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            answer_batch(model, BatchInput.open(requests), output, parallel=2, progress=stop)
    head = unfinished.read_text("utf-8")
    unfinished.write_text(f"{head}{json.dumps(kept)}\n" + '{"line": 3, "failed": fal', "utf-8")
    # As left by a run that was killed before it removed the partial file.
    done = run("batch", requests, "-o", output, "--json", *SMALL)
    assert json.loads(done.stdout).items() >= {"requests": 3, "failed": 0, "resumed": 1}.items()
    assert [reply.pop("kept", False) for reply in replies(output)] == [False, True, False]
    assert list(map(said, replies(output))) == list(map(said, whole)) and not unfinished.exists()

    output.unlink()
    unfinished.write_text(head + json.dumps(kept) + "\n", "utf-8")
    write_lines(requests, *lines, {"prompt": "One more"})
    refuses(2, "is of another batch: it differs in input.", run("batch", requests, "-o", output, *SMALL))
    unfinished.write_text("notes of my own\n", "utf-8")
    refuses(2, "is of another batch", run("batch", requests, "-o", output, *SMALL))
    assert unfinished.read_text("utf-8") == "notes of my own\n"


def test_what_would_lose_something_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    requests, output = write_lines(tmp_path / "requests.jsonl", {"prompt": "Tom"}), tmp_path / "replies.jsonl"

    def refused(says: str, *arguments: str | Path, code: int = 2) -> None:
        refuses(code, says, run("batch", *arguments, "-m", "no-such-model"))

    refused("would overwrite the requests", requests, "-o", requests)
    (tmp_path / "link").symlink_to(requests)
    refused("would overwrite the requests", requests, "-o", tmp_path / "link")
    output.touch()
    refused("exists already", requests, "-o", output)
    refused("cannot be written", requests, "-o", tmp_path / "nowhere" / "replies.jsonl", code=5)
    refused("is out of range", requests, "-o", output, "--force", "--parallel", "0")
    refused("has no requests", write_lines(tmp_path / "empty", "", " "), "-o", tmp_path / "out")
    refused("Cannot read", tmp_path / "absent", "-o", tmp_path / "out")
    twins = write_lines(tmp_path / "twins", {"custom_id": "a", "prompt": "x"}, "{", {"custom_id": "a", "prompt": "y"})
    refused("Lines 1 and 3 have the same custom_id 'a'", twins, "-o", tmp_path / "out")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX systems")
def test_a_run_that_is_killed_again_and_again_gives_what_an_uninterrupted_one_gives(tmp_path: Path) -> None:
    about = ("Tom", "Lily", "a dog", "the sea")
    lines = [
        {"custom_id": f"{i}", "prompt": f"{STORY * (i % 3)}{about[i % 4]} {i}", "temperature": i % 2, "max_tokens": 8}
        for i in range(90)
    ]
    requests, output = write_lines(tmp_path / "requests.jsonl", *lines), tmp_path / "replies.jsonl"
    kept = tmp_path / "replies.jsonl.partial"
    whole = tmp_path / "whole.jsonl"
    assert run("batch", requests, "-o", whole, *SMALL).returncode == 0
    for least in (10, 35, 60):
        with start("batch", requests, "-o", output, *SMALL) as process:
            wait_until(partial(has_lines, kept, least), f"{least} replies")
            assert process.poll() is None
            process.kill()
        assert not output.exists()
    done = run("batch", requests, "-o", output, "--json", *SMALL)
    assert 60 <= json.loads(done.stdout)["resumed"] < 90
    assert list(map(said, replies(output))) == list(map(said, replies(whole))) and len(replies(output)) == 90


@pytest.mark.slow
def test_a_full_disk_is_one_error_and_keeps_what_is_done(tmp_path: Path) -> None:
    lines = [{"prompt": f"Tom {i}", "max_tokens": 4} for i in range(80)]
    requests = write_lines(tmp_path / "requests.jsonl", *lines)
    (tmp_path / "disk").mkdir()
    script = (
        f'cd $1; shift; "$@" batch {requests} -o out {" ".join(SMALL)}; code=$?; tail -c 1 out.partial | od -An -c; '
        f'mount -o remount,size=4m . ; "$@" batch {requests} -o out {" ".join(SMALL)} --json; cat out; exit $code'
    )
    done = with_mount(tmp_path / "disk", "size=32k", script)
    assert done.returncode == 5 and b"error: The disk is full: out.partial." in done.stderr
    assert b"the same command goes on from there" in done.stderr and done.stdout.lstrip().startswith(rb"\n")
    assert b'"custom_id": "line-80"' in done.stdout and b'"resumed": 0' not in done.stdout
