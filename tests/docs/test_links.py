"""Links of README and docs: files and headings that they name are there, and addresses are written as such."""

from __future__ import annotations

from urllib.parse import urlsplit

from tests.docs.pages import DOCS, README, ROOT, Link, Page, pages

# Words of headings that pages of the build have, as no file here says.
_MOST_LINES = 200


def wrong(link: Link, known: dict[str, Page]) -> str:
    """What is wrong with a link; empty where nothing is."""
    parts = urlsplit(link.target)
    if parts.scheme:
        fits = parts.scheme == "https" and "." in parts.netloc and not parts.username
        return "" if fits or parts.netloc.startswith(("127.0.0.1", "localhost")) else "is no https address"
    target = (link.page.parent / parts.path).resolve() if parts.path else link.page
    name = target.relative_to(ROOT).as_posix() if target.is_relative_to(ROOT) else ""
    if name.startswith("docs/reference/") and name not in known:
        # Written by the build, which checks links of its own.
        return "" if link.page.is_relative_to(DOCS) else "is there only in the built site"
    if not name or not target.exists():
        return "names no file"
    if parts.fragment and (name not in known or parts.fragment not in known[name].anchors):
        return "names no heading"
    if link.page.is_relative_to(DOCS) and not target.is_relative_to(DOCS):
        return "leads out of the site"
    return ""


def test_every_link_leads_somewhere() -> None:
    known = {page.path.relative_to(ROOT).as_posix(): page for page in pages()}
    links = [link for page in pages() for link in page.links]
    assert len(links) > 60
    assert [f"{link}: {reason}" for link in links if (reason := wrong(link, known))] == []


def test_every_page_can_be_reached_from_the_first() -> None:
    listed = "".join(page.path.read_text("utf-8") for page in pages())
    names = [page.path.relative_to(DOCS).with_suffix("").as_posix() for page in pages() if page.path != README]
    assert [name for name in names if not name.endswith("README") and name != "index" and name not in listed] == []


def test_the_readme_is_short() -> None:
    assert len(README.read_text("utf-8").splitlines()) <= _MOST_LINES
