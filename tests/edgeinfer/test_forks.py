"""Children of a fork end, and answer as their parent does, whatever it was doing with its model when it forked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import TIME_LIMIT, environment
from tests.gguf_models import builtin_gguf
from tests.speculation import needs_builtin

pytestmark = [needs_builtin, pytest.mark.skipif(not hasattr(os, "fork"), reason="only POSIX forks")]

# Each child ends by an alarm if it waits for something that does not come.
_SCRIPT = """
import asyncio, os, signal, sys, threading, traceback
import edgeinfer
from edgeinfer.core.errors import UsageError

OPTIONS = dict(max_tokens=12, ignore_eos=True)
model = edgeinfer.load({model!r}, context=256, threads=2, parallel=2{options})
expected = model.generate("Once upon a time", **OPTIONS).text

def child(work):
    process = os.fork()
    if process == 0:
        signal.alarm(60)
        try:
            work()
        except Exception:
            traceback.print_exc()
            sys.exit(1)
        sys.exit(0)  # as gunicorn's workers end; what they had is freed on the way
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert code == 0, (work.__name__, code)
    print(work.__name__, flush=True)

def ends():
    pass

def answers():
    assert model.generate("Once upon a time", **OPTIONS).text == expected

async def replies():
    return [reply.text for reply in await asyncio.gather(*(
        model.agenerate("Once upon a time", **OPTIONS) for _ in range(2)))]

def answers_in_a_loop():
    assert asyncio.run(replies()) == [expected] * 2

def answers_a_chat():
    if model.chat_template_text is not None:
        model.stream_chat([dict(role="user", content="Hi")], max_tokens=2).complete()

def closes():
    model.close()

def forks_again():
    child(answers)

def is_a_daemon():
    os.setsid()
    child(answers)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        os.dup2(os.open(os.devnull, os.O_RDWR), stream.fileno())

for work in {works}:
    child(work)
assert asyncio.run(replies()) == [expected] * 2  # on a thread of the parent's
child(answers_in_a_loop)

def leaves_its_parents_reply():
    try:
        next(stream)
    except UsageError as error:
        assert "forked" in str(error), error
    else:
        raise AssertionError("the reply went on")
    stream.cancel()
    stream.close()
    answers()

# While a reply is being read, and while another thread makes one.
stream = model.stream("Once upon a time", **OPTIONS)
text = next(stream).text
child(leaves_its_parents_reply)
assert text + "".join(chunk.text for chunk in stream) == expected
begun, over = threading.Event(), threading.Event()

def reply():
    with model.stream("There was", max_tokens=200, ignore_eos=True) as running:
        for chunk in running:
            begun.set()
            if over.is_set():
                break

for count in range(3):
    begun.clear()
    over.clear()
    thread = threading.Thread(target=reply)
    thread.start()
    begun.wait()
    for work in (ends, answers) if count else (answers,):
        child(work)
    over.set()
    thread.join()

# What is kept of a model that is away is the parent's.
model.unload()
aside = model._lifecycle._aside
child(answers)
child(ends)
assert aside is None or aside.exists()
assert model.generate("Once upon a time", **OPTIONS).text == expected
model.close()
child(ends)
print("done")
"""
_WORKS = "(ends, answers, answers_in_a_loop, answers_a_chat, closes, forks_again, is_a_daemon)"


def run_script(tmp_path: Path, model: str | None, options: str = "") -> None:
    # A file, so that tracebacks show its lines.
    script = tmp_path / "forks.py"
    script.write_text(_SCRIPT.format(model=model, options=options, works=_WORKS), "utf-8")
    # Python 3.12 warns of every fork of a process with threads.
    env = environment() | {"PYTHONWARNINGS": "ignore", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=TIME_LIMIT * 3)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stdout + done.stderr


@pytest.mark.slow
def test_a_child_ends_and_answers_while_another_thread_holds_the_model(tmp_path: Path) -> None:
    code = """
import os, signal, sys, threading
import edgeinfer
model = edgeinfer.load(context=64, threads=2)
expected = model.generate("Once", max_tokens=3).text
holds, over = threading.Event(), threading.Event()

def hold():
    with model._lifecycle._lock, model._replies.turns._lock:
        holds.set()
        over.wait()

threading.Thread(target=hold).start()
holds.wait()
process = os.fork()
if process == 0:
    signal.alarm(60)
    assert model.generate("Once", max_tokens=3).text == expected
    sys.exit(0)
code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
over.set()
sys.exit(code)
"""
    env = environment() | {"PYTHONWARNINGS": "ignore", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=TIME_LIMIT)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("speculation", ["off", "auto", "ngram"])
def test_children_end_and_answer(tmp_path: Path, speculation: str) -> None:
    run_script(tmp_path, None, f", speculation={speculation!r}")


@pytest.mark.slow
@pytest.mark.gguf
def test_children_of_a_process_with_a_gguf_file_end_and_answer(tmp_path: Path) -> None:
    run_script(tmp_path, str(builtin_gguf()), ", backend='llamacpp'")
