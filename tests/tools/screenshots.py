"""Pictures of the chat app's main states, taken in a real browser.

    python -m tests.tools.screenshots --models FOLDER --large NAME
    python -m tests.tools.screenshots --real MODEL

The folder's models are shown in the picker next to the built-in one, another small one with "stories" in its name among
them. `--large` is the one that is planned and loaded there: a model of some hundred megabytes, so that its plan has
something to show. `--real` is one that answers questions, such as Qwen2.5-Coder 0.5B: the conversation that the README
shows is its own. Others are the built-in model's, but for one with Markdown and code, which that model cannot write.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from playwright.sync_api import Browser, FilePayload, Page, expect, sync_playwright

from edgeinfer.core.errors import BackendError, EdgeInferError, UsageError

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_WIDE, _NARROW = (1280, 800), (380, 760)
_PATIENCE_MS = 60_000
_LOADED = "#model-button .dot.ready"
_TALKS = (
    "Tell me a story about a lighthouse.",
    "A story about two friends and a kite",
    "Once upon a time there was an old clock",
    "Tell me a story about a little boat.",
)
# Asked of a real model, which takes the likeliest token; its answers were read and are right.
_QUESTIONS = ("What is the quadratic formula? Give it in LaTeX, then a short Python function that solves it.",)
_WRITTEN = """A *budget* is the memory that the whole process may take. Before anything is allocated, a plan lists every
term in bytes and chooses what fits:

1. **Weights**, mapped from their file or streamed a few layers at a time
2. **Cache** of the conversation, in `float32` or `int8`
3. **Drafting**, where there is room for it

```python
import edgeinfer

model = edgeinfer.load("my-bundle", memory="600MB")  # a path or a hub id
for chunk in model.stream("Once upon a time", max_tokens=64):
    print(chunk.text, end="")
```

| term | of what | counts |
|:--|:--|--:|
| `weights_mapped` | pages of the model's file | while used |
| `kv` | keys and values of each token | always |

> What does not fit is told in advance, with the smallest budget that would.
"""


@contextlib.contextmanager
def _app(*options: str | Path) -> Iterator[str]:
    """The address of an app with no history, on a machine that has none of the hub's models."""
    with tempfile.TemporaryDirectory() as data:
        command = [sys.executable, "-m", "edgeinfer.apps.cli.main", "chat", "--no-window", "--data", data]
        command += map(str, options)
        own = os.environ | {"HF_HOME": f"{data}/hub", "XDG_DATA_HOME": f"{data}/home", "HF_HUB_OFFLINE": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own) as process:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            try:
                if not address:
                    raise BackendError("The app did not start.", "Try `edgeinfer chat --no-window`.")
                yield address
            finally:
                process.terminate()


def _page(browser: Browser, address: str, size: tuple[int, int] = _WIDE, *, dark: bool = False) -> Page:
    width, height = size
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        # A picture in the middle of an animation would differ each time.
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.goto(address)
    return page


def _ready(page: Page) -> None:
    expect(page.locator(_LOADED)).to_be_visible(timeout=60_000)


def _ask(page: Page, text: str, patience_ms: int = _PATIENCE_MS) -> None:
    before = page.locator("article.assistant").count()
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")
    expect(page.locator("article.assistant")).to_have_count(before + 1)
    _finished(page, patience_ms)


def _new_chat(page: Page) -> None:
    page.keyboard.press("Control+Shift+O")
    expect(page.locator("article.assistant")).to_have_count(0)


def _finished(page: Page, patience_ms: int = _PATIENCE_MS) -> None:
    expect(page.locator("article.assistant").last).to_have_attribute("aria-busy", "false", timeout=patience_ms)


def _planned(page: Page) -> None:
    expect(page.locator(".plan:not(.stale) .legend li").first).to_be_visible()


def _budget(page: Page, size: str) -> None:
    if not page.locator("#budget-switch").is_checked():
        page.locator("label.switch").click()
    page.locator("#budget-size").fill(size)
    page.locator("#budget-size").press("Enter")
    _planned(page)


def _pick(page: Page, model: str) -> None:
    page.locator("#model-button").click()
    page.locator("#models").get_by_role("option").filter(has_text=model).first.click()
    _planned(page)


def _write(page: Page) -> None:
    """A conversation whose reply, which the built-in model cannot write, was put into the history."""
    _new_chat(page)
    _ask(page, "How does a memory budget work?")
    page.get_by_role("button", name="Edit", exact=True).last.click()
    page.get_by_role("textbox", name="Edit the reply").fill(_WRITTEN)
    page.get_by_role("button", name="Save").click()
    expect(page.locator("article.assistant .code")).to_be_visible()


Shoot = Callable[[Page, str], None]
Scene = Callable[[Browser, Shoot], None]


def _chats(models: Path, large: str, browser: Browser, shoot: Shoot) -> None:
    """The start, conversations and the picker, in light and dark, wide and narrow."""
    with _app("--models", models, "--seed", "3") as address:
        for dark, ending in ((True, "-dark"), (False, "")):
            page = _page(browser, address, dark=dark)
            _ready(page)
            expect(page.locator(".offered .card").first).to_be_visible()
            shoot(page, f"start{ending}")
            page.get_by_role("button", name="See all").click()
            expect(page.locator(".catalog-pane .card").first).to_be_visible()
            shoot(page, f"catalog{ending}")
            page.get_by_role("button", name="Close", exact=True).click()
        for text in _TALKS:
            _new_chat(page)
            _ask(page, text)
        page.get_by_role("button", name="Regenerate").last.click()
        expect(page.locator(".branches").last).to_have_text("2/2")
        _finished(page)
        _write(page)
        page.get_by_role("button", name="Chat settings").click()
        shoot(page, "markdown-and-settings")
        _models(browser, address, large, shoot)


def _real(model: str, browser: Browser, shoot: Shoot) -> None:
    """A conversation with a real model, with formulas and code."""
    with _app("-m", model, "--temperature", "0", "-n", "400") as address:
        page = _page(browser, address)
        _ready(page)
        for text in _QUESTIONS:
            _ask(page, text, 10 * _PATIENCE_MS)
        here = page.url
        for size, dark, name in (
            (_WIDE, False, "conversation-light"),
            (_WIDE, True, "conversation-dark"),
            (_NARROW, False, "narrow"),
        ):
            other = _page(browser, address, size, dark=dark)
            other.goto(here)
            _finished(other)
            expect(other.locator(".katex").first).to_be_visible()
            # With their fonts formulas are higher, and the thread follows its end.
            other.evaluate("document.fonts.ready.then(() => new Promise(done => setTimeout(done, 500)))")
            other.locator("#thread").evaluate("thread => { thread.scrollTop = 0; }")
            shoot(other, name)


def _models(browser: Browser, address: str, large: str, shoot: Shoot) -> None:
    for size, dark, name in ((_WIDE, False, "models"), (_WIDE, True, "models-dark"), (_NARROW, False, "narrow-models")):
        page = _page(browser, address, size, dark=dark)
        _ready(page)
        _pick(page, large)
        _budget(page, "500 MB")
        shoot(page, name)
    page = _page(browser, address)
    _ready(page)
    _pick(page, large)
    _budget(page, "90 MB")
    shoot(page, "budget-too-small")
    _budget(page, "1 GB")
    page.locator("#load-button").click()
    expect(page.locator(".notice.loading")).to_be_visible()
    shoot(page, "loading")


def _memory_short(browser: Browser, shoot: Shoot) -> None:
    """A budget that the chosen model does not fit."""
    with _app("--memory", "40MB") as address:
        page = _page(browser, address)
        expect(page.locator(".notice.failed")).to_be_visible(timeout=60_000)
        shoot(page, "memory-short")


_NOTES = """# The harbour

The lighthouse stands at the end of the pier. Its keeper is called Ada, and she has a grey cat.
The ferry leaves at nine and comes back at five. On Sundays it stays in the harbour.
"""


def _attached(browser: Browser, shoot: Shoot) -> None:
    """A message with a file, before and after it is sent, and a reply that stopped at its length limit."""
    files: list[FilePayload] = [
        {"name": "harbour.md", "mimeType": "text/markdown", "buffer": _NOTES.encode()},
        {
            "name": "tides.csv",
            "mimeType": "text/csv",
            "buffer": b"day,high,low\nMonday,6:10,12:25\nTuesday,7:02,13:14\n",
        },
    ]
    with _app("--seed", "5", "-n", "40") as address:
        pages = [_page(browser, address, dark=dark) for dark in (True, False)]
        for page in pages:
            _ready(page)
            page.get_by_label("Files to attach").set_input_files(files)
            page.locator("#prompt").fill("Tell me a story about the keeper of the lighthouse.")
            expect(page.locator(".chips-note")).to_contain_text("takes")
            shoot(page, "attachment-dark" if page is pages[0] else "attachment")
        pages[1].locator("#prompt").press("Enter")
        _finished(pages[1])
        expect(pages[1].locator(".mishap")).to_contain_text("length limit")
        shoot(pages[1], "continue")
        pages[0].goto(pages[1].url)
        _finished(pages[0])
        shoot(pages[0], "continue-dark")
        for number, page in enumerate(pages):
            page.evaluate("sessionStorage.clear()")
            page.goto(address)
            _ready(page)
            text = f"{_NOTES}{number + 1} boats lie at the pier.\n" * 5
            file: FilePayload = {"name": f"pier-{number + 1}.md", "mimeType": "text/markdown", "buffer": text.encode()}
            page.get_by_label("Files to attach").set_input_files([file])
            page.get_by_role("button", name=re.compile("for later conversations")).click()
            expect(page.locator(".composer .chip .facts").last).to_contain_text("kept")
        narrow = _page(browser, address, _NARROW)
        _ready(narrow)
        for page, ending in zip((*pages, narrow), ("-dark", "", "-narrow"), strict=True):
            page.get_by_role("button", name="Kept files", exact=True).click()
            expect(page.locator(".kept-list li")).to_have_count(2)
            shoot(page, f"kept-files{ending}")


def _own_model(models: Path, large: str, browser: Browser, shoot: Shoot) -> None:
    """A chat with another model than the loaded one."""
    with _app("--models", models, "--seed", "3", "-n", "150") as address:
        page = _page(browser, address)
        _ready(page)
        _ask(page, _TALKS[-1])
        _new_chat(page)
        _pick(page, "stories")
        page.locator("#load-button").click()
        expect(page.locator("#models")).to_be_hidden()
        _ready(page)
        page.locator(".entry a").first.click()
        expect(page.locator(".notice.other")).to_be_visible()
        page.get_by_role("button", name="Chat settings").click()
        shoot(page, "own-model")


def _context_full(browser: Browser, shoot: Shoot) -> None:
    """A conversation that has used up the context."""
    with _app("--context", "256", "--seed", "3") as address:
        page = _page(browser, address)
        _ready(page)
        while not page.locator(".notice.full").is_visible():
            _ask(page, "Tell me a long story about a boat, a kite, a fox and an owl.")
        shoot(page, "context-full")


@contextlib.contextmanager
def _browser() -> Iterator[Browser]:
    """A browser without a window.

    Raises:
        UsageError: none is installed.
    """
    found = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if found is None:
        raise UsageError("There is no browser.", f"Install one of {', '.join(_BROWSERS)}.")
    # Plans and replies take seconds where the machine is busy.
    expect.set_options(timeout=_PATIENCE_MS)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


def take(scenes: Sequence[Scene], out: Path) -> list[Path]:
    """Take all pictures of some scenes."""
    taken: list[Path] = []

    def shoot(page: Page, name: str) -> None:
        taken.append(out / f"{name}.png")
        page.screenshot(path=taken[-1])

    with _browser() as browser:
        for scene in scenes:
            scene(browser, shoot)
    return taken


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, metavar="FOLDER", help="with bundles or GGUF files")
    parser.add_argument("--large", metavar="NAME", help="of the model that is planned and loaded")
    parser.add_argument("--real", metavar="MODEL", help="take the conversation with this model instead")
    parser.add_argument("--out", type=Path, default=Path("docs/screenshots"), metavar="FOLDER")
    args = parser.parse_args(arguments)
    if args.real is None and None in (args.models, args.large):
        parser.error("give --models and --large, or --real")
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        if args.real is not None:
            taken = take([partial(_real, args.real)], args.out)
        else:
            models = [partial(scene, args.models, args.large) for scene in (_chats, _own_model)]
            taken = take([*models, _attached, _memory_short, _context_full], args.out)
    except EdgeInferError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    for path in taken:
        print(f"{path}: {path.stat().st_size / 1000:.0f} KB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
