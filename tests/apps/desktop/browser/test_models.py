"""Models in the window: choosing, planning under a budget, loading, unloading, and what cannot be had."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import APIResponse, Route, expect

from tests.apps.desktop.browser.app_process import App, make_models, running
from tests.apps.desktop.browser.window import Window
from tests.speculation import needs_builtin

pytestmark = [needs_builtin, pytest.mark.browser]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """The app in a process of its own: budgets are of whole processes, and tests are large ones."""
    models = make_models(tmp_path_factory.mktemp("models"))
    with running(tmp_path_factory.mktemp("data"), "--models", models) as started:
        yield started


@pytest.fixture
def own(window: Window) -> Iterator[Window]:
    """A window whose model may be replaced."""
    yield window
    load(window)


def load(window: Window, memory: int | None = None) -> None:
    """Let the app load the built-in model under a budget."""
    body = {"model": "built-in", "memory": memory, "context": None}
    origin = window.page.url.partition("#")[0]
    assert window.page.request.post(f"{origin}app/api/model/load", data=body).status == 202


def megabytes(text: str) -> float:
    """The first size in a text."""
    found = re.search(r"([\d.,]+) (MB|GB)", text)
    assert found is not None, text
    return float(found[1].replace(",", "")) * (1000 if found[2] == "GB" else 1)


def test_models_say_what_they_are_and_need_before_loading(window: Window) -> None:
    window.choose_model("second-tales")
    option = window.models.get_by_role("option", name=re.compile("second-tales"))
    assert re.search(r"5\.\dM · [\d.]+-bit · 1,024 context", option.inner_text())
    # What it needs is said once, by the plan.
    assert "Needs" not in option.inner_text()
    assert window.plan_says().startswith("Needs ")
    legend = window.models.locator(".legend").inner_text()
    assert "Weights" in legend and "Program and libraries" in legend


def test_the_list_says_that_it_is_being_made(window: Window) -> None:
    with window.holding(r"/app/api/models$"):
        window.page.locator("#model-button").click()
        expect(window.models.get_by_role("status").filter(has_text="Looking for models…")).to_be_visible()
        expect(window.models.get_by_label("Context")).to_be_hidden()
    expect(window.models.get_by_role("option", name=re.compile("second-tales"))).to_be_visible()
    expect(window.models.get_by_label("Context")).to_be_visible()
    expect(window.models.get_by_text("Looking for models…")).to_have_count(0)


def test_a_broken_model_says_why_and_cannot_be_loaded(window: Window) -> None:
    window.page.locator("#model-button").click()
    option = window.models.get_by_role("option", name=re.compile("broken-tales"))
    expect(option.locator(".broken")).to_contain_text("bytes")
    option.click()
    expect(window.models.locator("#verdict")).to_have_class(re.compile("broken"))
    expect(window.models.locator("#load-button")).to_be_disabled()


def test_the_plan_follows_the_budget(window: Window) -> None:
    window.choose_model("second-tales")
    wide = megabytes(window.plan_says())
    window.set_budget("1 GB")
    assert window.plan_says().startswith("Fits: ")
    window.set_budget("30 MB")
    assert window.plan_says().startswith("Does not fit")
    expect(window.models.locator("#load-button")).to_be_disabled()
    assert 30 < megabytes(window.plan_says().partition("at least")[2]) <= wide + 5
    window.models.locator("#verdict button").click()
    window.plan_made()
    expect(window.models.locator("#load-button")).to_be_enabled()
    slider = window.models.get_by_role("slider", name="Memory budget")
    before = slider.get_attribute("aria-valuetext")
    slider.press("PageUp")
    window.plan_made()
    assert slider.get_attribute("aria-valuetext") != before
    expect(window.models.locator("#verdict")).to_contain_text("Fits")


def test_switching_models_under_a_budget(own: Window) -> None:
    own.choose_model("second-tales")
    own.models.get_by_label("Context", exact=True).select_option(label="512 tokens")
    own.set_budget("400 MB")
    assert own.plan_says().startswith("Fits: ")
    own.models.locator("#load-button").click()
    expect(own.models).to_be_hidden()
    button = own.page.locator("#model-button")
    expect(button).to_contain_text("of 400 MB · 512 context")
    own.wait_ready()
    assert len(own.ask()) > 20
    expect(own.page.locator(".meter")).to_contain_text("/ 512")
    button.click()
    expect(own.models.get_by_role("option", name=re.compile("second-tales"))).to_contain_text("loaded")


def test_an_answer_that_comes_late_does_not_undo_what_was_loaded(own: Window) -> None:
    """The events of a small model overtake the answer to the request that loads it, which says that it is loading."""
    late: list[tuple[Route, APIResponse]] = []
    own.page.route(re.compile("/model/load$"), lambda route: late.append((route, route.fetch())))
    own.choose_model("second-tales")
    own.models.locator("#load-button").click()
    expect(own.page.locator("#model-button .name")).to_have_text(re.compile("second-tales", re.IGNORECASE))
    own.wait_ready()
    ((route, answer),) = late
    route.fulfill(response=answer)
    expect(own.models).to_be_hidden()
    own.wait_ready()


def test_unloading_frees_the_model_and_says_so(own: Window) -> None:
    own.page.locator("#model-button").click()
    own.button("Unload", own.models).click()
    expect(own.button("Unload", own.models)).to_be_hidden()
    own.button("Close", own.models).click()
    notice = own.page.get_by_role("region", name="No model is loaded")
    expect(notice).to_be_visible()
    own.prompt.fill("Hello")
    expect(own.button("Send")).to_be_disabled()
    own.button("Choose a model", notice).click()
    own.plan_made()
    own.models.locator("#load-button").click()
    own.wait_ready()
    expect(own.button("Send")).to_be_enabled()


def test_a_budget_that_is_too_small_says_what_would_do(own: Window) -> None:
    load(own, memory=40_000_000)
    notice = own.page.get_by_role("region", name="The memory budget is too small")
    expect(notice).to_be_visible()
    assert "40.0 MB" in notice.inner_text()
    own.button(re.compile("Load with"), notice).click()
    expect(notice).to_be_hidden()
    own.wait_ready()
    assert len(own.ask()) > 20


def test_a_download_that_cannot_be_had_says_why(window: Window) -> None:
    window.page.locator("#model-button").click()
    window.button("Get more", window.models).click()
    field = window.page.get_by_role("searchbox", name="Search models")
    field.fill("nobody/nothing")
    field.press("Enter")
    entry = window.models.get_by_role("article", name="nobody/nothing")
    window.button("Download nobody/nothing", entry).click()
    expect(entry.locator(".broken")).to_contain_text("nobody/nothing is not on this machine")
    assert "edgeinfer models" not in window.models.inner_text()
    # The browser notes the refused search.
    window.problems[:] = [problem for problem in window.problems if "409" not in problem]
