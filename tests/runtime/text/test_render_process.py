"""The process that renders unknown templates, and hostile templates in it and in the sandbox."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from edgeinfer.core.errors import TemplateError
from edgeinfer.runtime.text import render_process
from edgeinfer.runtime.text.rendering import RenderError, Rendering
from edgeinfer.runtime.text.template import ChatTemplate
from tests.tables import each_row
from tests.waiting import TIME_LIMIT, wait_until

# What a first attack found to hang or to take gigabytes.
EXAMPLES = [
    "{{ 1|round(30000000, 'ceil') }}",
    "{{ (1).from_bytes([255] * 8000000, 'big') // (1).from_bytes([255] * 4000000, 'big') }}",
    "{{ ['a' * 1000000] * 90000 | max }}",
    "{{ (['a' * 1000000] * 90000) | max }}",
    "{% set n = namespace(x=[]) %}{% for i in range(900) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
    "{{ n.x | tojson(indent=16) }}",
    "{{ strftime_now('%200Y' * 2000000) }}",
]
# Endless work, and what is too large at one stroke.
LOOPS = [
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{{ caller() }}{% call f(n) %}{{ caller() }}{% endcall %}{% endmacro %}"
    "{% call f(1) %}x{% endcall %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) if range(99999) | select('eq', 1) | list %}{% endfor %}",
]
TOO_LARGE = [
    "{{ 'x' * 10 ** 10 }}",
    "{{ [0] * 10 ** 10 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% set n = namespace(x='é') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
]
_GROW = "{% set n = namespace(x=START) %}{% for i in range(99) %}{% set n.x = STEP %}{% endfor %}"
# Texts that double in every step, and values that share parts, so that walking them takes 2 ** 99 steps.
_GROWING = [
    _GROW.replace("START", start).replace("STEP", step) + use
    for start, step, use in (
        ("'aaaaaaaaaa'", "n.x ~ n.x", ""),
        ("'a,'", "n.x.replace('a', n.x)", ""),
        ("'ab'", "'{0}{0}{0}'.format(n.x)", ""),
        ("'ab'", "[n.x, n.x, n.x] | tojson", ""),
        ("{}", "dict(n.x, a=n.x, b=n.x)", "{{ n.x }}"),
        ("[1]", "[n.x, n.x]", "{{ n.x == [[n.x, n.x], [n.x, n.x]][0] }}"),
        ("(1, 2)", "(n.x, n.x)", "{{ [n.x, n.x] | unique | list }}"),
        ("{'a': 1}", "{'a': n.x, 'b': n.x}", "{{ raise_exception(n.x) }}"),
    )
]
_OPERATIONS = [
    "{{ range(10 ** 9) }}",
    "{{ " + "9" * 5000 + " }}",
    "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}",
    "{% macro f(x, n) %}{% if n %}{{ f(x ~ x, n - 1) }}{% else %}{{ x }}{% endif %}{% endmacro %}{{ f('aa', 60) }}",
    "{% filter upper %}{% for i in range(99999) %}{{ 'ß' * 9999 }}{% endfor %}{% endfilter %}",
    "{{ ('a' * 1000).replace('', 'b' * 1000000) }}",
    "{{ range(99999) | join('a' * 100000) }}",
    "{{ [['x' * 100000] * 1000] * 1000 }}",
    "{% set x = 'a' * 1000000 %}{{ x.rsplit('b' ~ 'a' * 500000) }}",
    "{% set x = 'a' * 1000000 %}{{ ([x ~ 'b', x ~ 'c'] * 40000) | sort }}",
    "{{ ('9' * 4000000) | int }}",
    "{{ messages | map(attribute='9' * 90000) | list }}",
    "{{ 'a'.center(1000000000) }}",
    "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "{{ ('{' * 4000000).format(1) }}",
    "{{ [1] | tojson(indent=1000000000) }}",
    "{{ strftime_now('%Y' * 4000000) }}",
    "{{ 'a' | batch(1000000000) | list }}",
    "{{ lipsum(1000000000) }}",
    "{% include 'x' %}",
    "{{ '{}'.format(*([1] * 7000000)) }}",
]
ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''.__class__ }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ [''] | map(attribute='__class__') | list }}",
    "{{ [''] | map('attr', '__class__') | list }}",
    "{{ [''] | selectattr('__class__') | list }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{0[__class__]}'.format('') }}",
    "{{ messages.append(1) }}",
    "{{ messages.sort() }}",
    "{{ messages[0].update({}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ messages[0].clear() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{% macro f() %}{% endmacro %}{{ f._func }}",
    "{% macro f() %}{% endmacro %}{{ f._environment }}",
    "{% for i in [1] %}{{ loop._iterable }}{% endfor %}",
    "{% for i in [1] %}{{ loop.__class__ }}{% endfor %}",
    "{% set n = namespace() %}{{ n.__class__ }}",
    "{% set n = namespace() %}{{ n['_Namespace__attrs'] }}",
    "{{ (messages | select).gi_frame }}",
    "{{ (1).__class__ }}",
    "{{ none.__class__ }}",
    "{{ messages[0].items().__class__ }}",
]
HOSTILE = [*EXAMPLES, *LOOPS, *TOO_LARGE, *_GROWING, *_OPERATIONS]
ECHO = "{% for m in messages %}{{ m.content }}{% endfor %}"
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
BOOT = render_process._BOOT


def pid_of(template: ChatTemplate) -> int:
    assert template.process is not None and template.process.pid is not None
    return template.process.pid


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_one_process_serves_the_turns_of_a_conversation() -> None:
    template = ChatTemplate(ECHO, {})
    assert template.process is not None and template.process.pid is None
    assert template.render(MESSAGES) == "Hello"
    pid = pid_of(template)
    assert [template.render(MESSAGES * n) for n in range(1, 4)] == ["Hello" * n for n in range(1, 4)]
    assert pid_of(template) == pid
    template.close()
    assert gone(pid)
    assert template.render(MESSAGES) == "Hello"


def test_threads_take_turns() -> None:
    template = ChatTemplate(ECHO, {})
    texts = [f"{i} " * 5000 for i in range(12)]
    with ThreadPoolExecutor(6) as pool:
        rendered = list(pool.map(lambda text: template.render([{"role": "user", "content": text}]), texts))
    assert rendered == texts


def test_a_killed_process_is_replaced() -> None:
    template = ChatTemplate(ECHO, {})
    template.render(MESSAGES)
    pid = pid_of(template)
    psutil.Process(pid).kill()
    assert template.render(MESSAGES) == "Hello"
    assert pid_of(template) != pid


def test_it_ends_when_nobody_holds_its_template() -> None:
    template = ChatTemplate(ECHO, {})
    template.render(MESSAGES)
    pid = pid_of(template)
    del template
    gc.collect()
    assert gone(pid)


def boots(monkeypatch: pytest.MonkeyPatch, code: str) -> ChatTemplate:
    """A template whose process runs other code."""
    monkeypatch.setattr(render_process, "_BOOT", code)
    return ChatTemplate(ECHO, {})


def test_a_process_that_idles_ends_and_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    change = "import edgeinfer.runtime.text.rendering as w; w.IDLE_SECONDS = 0.5\nmain()"
    template = boots(monkeypatch, BOOT.replace("main()", change))
    assert template.render(MESSAGES) == "Hello"
    pid = pid_of(template)
    wait_until(lambda: gone(pid), "the end of an idle process")
    assert template.render(MESSAGES) == "Hello"


@pytest.mark.parametrize(
    "code",
    [
        "import time\ntime.sleep(3600)",
        "import sys, time\nsys.stdin.buffer.read(10)\ntime.sleep(3600)",
        "while True: pass",
    ],
)
def test_a_process_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(render_process, "KILL_AFTER_SECONDS", 1.0)
    template = boots(monkeypatch, code)
    for messages in (MESSAGES, [{"role": "user", "content": "x" * 1_000_000}]):
        with pytest.raises(TemplateError, match="more than 1 seconds"):
            template.render(messages)
        assert template.process is not None and template.process.pid is None


@each_row(
    "answer",
    [
        "os._exit(3)",
        "os.kill(os.getpid(), 9)",
        "os.write(1, b'abc')",
        "os.write(1, bytes([0, 0, 0, 9]) + b'{}')",
        "os.write(1, bytes([255, 255, 255, 255]))",
        "os.write(1, bytes([0, 0, 0, 2]) + b'[]')",
        "os.write(1, bytes([0, 0, 0, 2]) + b'{}')",
        "os.write(1, bytes([0, 0, 0, 10]) + b'{\"text\": 1}')",
        "os.write(1, bytes([0, 0, 0, 2]) + b'\\xff\\xff')",
        "raise SystemExit('no jinja2')",
    ],
)
def test_a_process_that_dies_or_answers_nonsense_is_a_template_error(
    monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    template = boots(monkeypatch, f"import os, sys\nsys.stdin.buffer.read(10)\n{answer}")
    with pytest.raises(TemplateError, match="ended"):
        template.render(MESSAGES)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only time is bounded")
@each_row("template", ["{{ 'x' | center(300000000) }}", "{{ '%300000000d' % 1 }}"])
def test_a_process_that_takes_too_much_memory_fails(template: str) -> None:
    with pytest.raises(TemplateError, match="more memory"):
        ChatTemplate(template, {}).render(MESSAGES)


def test_no_interpreter_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(ECHO, {})
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(TemplateError, match="no process can be started"):
        template.render(MESSAGES)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_it_has_nothing_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_SECRET", "key")
    template = ChatTemplate(ECHO, {})
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        template.render(MESSAGES)
    pid = pid_of(template)
    assert sorted(entry.name for entry in Path(f"/proc/{pid}/fd").iterdir()) == ["0", "1", "2"]
    assert b"EDGEINFER_SECRET" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert os.getsid(pid) == pid != os.getsid(0)  # so that a terminal's Ctrl-C does not reach it
    limits = {line[:26].strip(): line[26:].split()[:2] for line in Path(f"/proc/{pid}/limits").read_text().splitlines()}
    for name in ("Max file size", "Max processes", "Max core file size"):
        assert limits[name] == ["0", "0"]


PARENT = """import os, sys
from edgeinfer.runtime.text.template import ChatTemplate
template = ChatTemplate("{{ messages[0].content }}", {})
template.render([{"role": "user", "content": "x"}])
print(template.process.pid, flush=True)
sys.stdin.read()
"""


@each_row("end", ["killed", "ended"])
def test_it_does_not_outlive_its_parent(end: str) -> None:
    command: Any = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdin is not None
        pid = int(parent.stdout.readline())
        assert not gone(pid)
        if end == "killed":
            parent.send_signal(signal.SIGKILL if sys.platform != "win32" else signal.SIGTERM)
        else:
            parent.stdin.close()
        parent.wait(TIME_LIMIT)
        wait_until(lambda: gone(pid), "the end of the process that rendered")


def outcome(source: str) -> str:
    """The text that a template gives in this process, or why there is none."""
    try:
        (only,) = Rendering(source).render([{"messages": MESSAGES}], {"Y": "2026"})
    except RenderError as error:
        return f"refused: {error.reason}"
    assert "\n" not in only.failure[1] and len(only.failure[1]) <= 500
    return f"refused: {only.failure[1]}" if only.text is None else only.text


@each_row("source", ESCAPES)
def test_templates_do_not_reach_python(source: str) -> None:
    text = outcome(source)
    assert text.startswith("refused") or text in ("", "[]", "[Undefined]"), text
    assert MESSAGES == [{"role": "user", "content": "Hello"}]


def render_in_its_process(source: str) -> None:
    try:
        template = ChatTemplate(source, {})
        text = template.render(MESSAGES)
    except TemplateError:
        return
    assert len(text) < 2000, source
    template.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A render takes a second at most."""
    change = "import edgeinfer.runtime.text.rendering as r; r.CPU_SECONDS = 1\nmain()"
    monkeypatch.setattr(render_process, "_BOOT", render_process._BOOT.replace("main()", change))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory is not bounded")
@pytest.mark.usefixtures("impatient")
def test_what_an_attack_found_fails() -> None:
    for source in EXAMPLES[::3]:
        render_in_its_process(source)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory is not bounded")
@pytest.mark.usefixtures("impatient")
def test_hostile_templates_fail_or_give_something_short() -> None:
    for source in HOSTILE:
        render_in_its_process(source)
