"""Tables whose rows one test tries one after the other: quick rows that need no item each."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

Test = Callable[..., None]


def each_row(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Test], Test]:
    """Tries every row in the one test, by names as for `pytest.mark.parametrize`; what fails says which row it was.
    Each row has a folder of its own as `tmp_path`, what it patches is undone after it, and what was printed or logged
    before it is forgotten. All other fixtures are the same for all rows."""
    single = isinstance(names, str) and "," not in names
    listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = [(row,) if single else tuple(row) for row in rows]

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            for number, row in enumerate(table):
                given = dict(zip(listed, row, strict=True))
                with ExitStack() as stack:
                    own = {name: _own(name, value, number, stack) for name, value in fixtures.items()}
                    try:
                        test(**own, **given)
                    except BaseException as error:
                        error.add_note(f"Row {number} of the table: {given!r}"[:500])
                        raise

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in listed]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run

    return decorate


def _own(name: str, value: Any, number: int, stack: ExitStack) -> Any:
    """A fixture as one row gets it."""
    if isinstance(value, pytest.MonkeyPatch):
        return stack.enter_context(value.context())
    if isinstance(value, pytest.CaptureFixture):
        value.readouterr()
    elif isinstance(value, pytest.LogCaptureFixture):
        value.clear()
    elif name == "tmp_path" and isinstance(value, Path):
        value = value / str(number)
        value.mkdir()
    return value
