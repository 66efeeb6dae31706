"""Pictures of a report page in a real browser, in light and dark; knows nothing of what is on it.

python -m edgeinfer.apps.bench.report_screenshots PAGE [--out docs/screenshots]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from playwright.sync_api import sync_playwright

from edgeinfer.apps.bench.screenshots import find_browser
from edgeinfer.errors import UsageError

__all__ = ["main", "shoot"]

_WIDTH, _HEIGHT = 1100, 1500


def shoot(page: Path, out: Path, *, whole: bool = False) -> list[Path]:
    """Takes report-light.png and report-dark.png.

    Args:
        page: an HTML file.
        whole: the page to its end, not only what a tall window shows.

    Raises:
        UsageError: there is no browser, or no such page.
    """
    if not page.is_file():
        raise UsageError(f"There is no page {page}.", "Make one with edgeinfer bench report.")
    program = find_browser()
    out.mkdir(parents=True, exist_ok=True)
    taken = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            size = {"width": _WIDTH, "height": _HEIGHT}
            tab = browser.new_page(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
            tab.goto(page.resolve().as_uri())
            taken.append(out / f"report-{scheme}.png")
            tab.screenshot(path=taken[-1], full_page=whole)
        browser.close()
    return taken


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script and returns its exit code."""
    parser = argparse.ArgumentParser("python -m edgeinfer.apps.bench.report_screenshots", description=__doc__)
    parser.add_argument("page", type=Path, metavar="PAGE")
    parser.add_argument("--out", type=Path, default=Path("docs/screenshots"), metavar="FOLDER")
    parser.add_argument("--whole", action="store_true", help="to the end of the page")
    args = parser.parse_args(argv)
    try:
        for path in shoot(args.page, args.out, whole=args.whole):
            print(f"{path}: {path.stat().st_size / 1000:.0f} KB")
    except UsageError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
