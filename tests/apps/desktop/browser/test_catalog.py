"""Getting models in the window: from the first start to a chat with a downloaded one, by way of a download that was
cancelled and a restart; the hub is a server of the tests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from playwright.sync_api import Locator, expect

from tests.apps.desktop.browser.app_process import running
from tests.apps.desktop.browser.conftest import OpenWindow
from tests.apps.desktop.browser.window import Window
from tests.hub_server import Hub, hub_environment, serving
from tests.speculation import needs_builtin

pytestmark = [needs_builtin, pytest.mark.browser]

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random checkpoint of a megabyte."""
    pytest.importorskip("torch")
    from tests.factories import make_checkpoint

    folder = tmp_path_factory.mktemp("checkpoints") / "tiny-llama"
    make_checkpoint(folder, "Llama", chat_template=TEMPLATE, hidden_size=128, intermediate_size=256)
    return folder


@pytest.fixture
def hub(checkpoint: Path) -> Iterator[Hub]:
    """A hub with that checkpoint under a name of the catalog, and a repository of GGUF files."""
    files = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    types = {f"small-{kind}.gguf": bytes(size) for kind, size in (("Q4_K_M", 90_000), ("Q8_0", 150_000))}
    with serving({"HuggingFaceTB/SmolLM2-360M-Instruct": files, "org/small-GGUF": types}) as server:
        yield server


@pytest.fixture
def variables(hub: Hub, tmp_path: Path) -> Mapping[str, str]:
    """What makes the app use that hub, and folders of the test's own."""
    wanted = hub_environment(hub.url, tmp_path / "home")
    names = ("HF_ENDPOINT", "HF_HOME", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_XET", "NO_PROXY", "XDG_DATA_HOME")
    # The hub's library warns of its own.
    return {name: wanted[name] for name in names} | {"PYTHONWARNINGS": "default"}


def card(window: Window, name: str, within: Locator | None = None) -> Locator:
    """The entry of a model that can be had."""
    return (within or window.models).get_by_role("article", name=name, exact=True)


def test_from_the_first_start_to_a_chat_with_a_downloaded_model(
    hub: Hub, variables: Mapping[str, str], data: Path, checkpoint: Path, open_at: OpenWindow
) -> None:
    hub.stall_at = 200_000
    with running(data, variables=variables) as app:
        window = open_at(app.address)
        window.wait_ready()
        offered = window.page.get_by_role("region", name="Get a real model")
        expect(offered.get_by_role("article")).to_have_count(3)
        window.button("See all", offered).click()
        expect(window.models.locator(".pane-foot")).to_contain_text(
            re.compile(r"free on the disk\. Models may take up to")
        )
        entry = card(window, "smollm2-360m")
        expect(entry).to_contain_text("362M parameters · 724 MB to download · Apache-2.0")
        expect(entry).to_contain_text("needs 630 MB")
        window.button("Download smollm2-360m").click()
        expect(entry.get_by_role("status")).to_contain_text(re.compile(r"Downloading, [\d.]+ [KM]?B of [\d.]+ [KM]?B"))
        window.button("Cancel the download of smollm2-360m", entry).click()
        expect(window.button("Resume the download of smollm2-360m", entry)).to_be_visible()
        find_types(window)
        window.page.context.close()
    sent, hub.stall_at = hub.sent, None
    hub.go_on.set()
    with running(data, variables=variables) as app:
        window = open_at(app.address)
        window.wait_ready()
        window.page.locator("#model-button").click()
        left = window.models.locator(".downloads")
        expect(left).to_contain_text("Not finished.")
        window.button("Resume the download of smollm2-360m", left).click()
        toast = window.page.locator(".toast", has_text="SmolLM2 360M is ready.")
        window.button("Use it", toast).click()
        expect(window.models).to_be_hidden()
        window.wait_ready()
        expect(window.page.locator("#model-button .name")).to_have_text("SmolLM2 360M Instruct")
        window.ask("Hello")
        import_checkpoint(window, checkpoint)
        window.page.context.close()
    assert hub.sent > sent
    with running(data, variables=variables) as app:
        window = open_at(app.address)
        window.wait_ready()
        expect(window.page.locator("#model-button .name")).to_have_text("SmolLM2 360M Instruct")
        window.entries.get_by_role("link").first.click()
        expect(window.questions).to_have_text(["Hello"])
        window.page.context.close()


def find_types(window: Window) -> None:
    """Search the hub and look at the types of a repository of GGUF files."""
    window.page.get_by_role("searchbox", name="Search models").fill("small")
    window.page.keyboard.press("Enter")
    row = card(window, "org/small-GGUF")
    window.button("Types of org/small-GGUF", row).click()
    expect(row.locator(".offer")).to_have_count(2)
    expect(row.locator(".offer").first).to_contain_text(re.compile(r"Q4_K_M\s*recommended\s*90 KB to download"))


def import_checkpoint(window: Window, folder: Path) -> None:
    """Import a folder by its path, after one that does not exist."""
    window.page.locator("#model-button").click()
    window.button("Import from disk", window.models).click()
    field = window.models.get_by_label("Import a model from this computer")
    for path, says in ((folder.parent / "missing", "There is no file or folder"), (folder.parent, "contains no model")):
        field.fill(str(path))
        field.press("Enter")
        expect(window.page.locator(".toast").last).to_contain_text(says)
    # The browser notes each refusal.
    window.problems[:] = [problem for problem in window.problems if "409" not in problem]
    field.fill(str(folder))
    field.press("Enter")
    expect(window.page.locator(".toast", has_text="Tiny Llama is ready.")).to_be_visible()
    option = window.models.get_by_role("option", name=re.compile("Tiny Llama"))
    option.click()
    window.plan_made()
    window.button("Remove", window.models).click()
    window.button(re.compile(r"Remove [\d.]+ [KM]B from the disk\?"), window.models).click()
    expect(option).to_have_count(0)
    assert (folder / "model.safetensors").is_file()
