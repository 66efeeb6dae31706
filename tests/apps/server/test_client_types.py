"""Every request that the official clients' types allow is answered, or refused for a documented reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from edgeinfer.apps.server.anthropic import ANTHROPIC_KINDS
from edgeinfer.apps.server.completions import OPENAI_KINDS
from edgeinfer.apps.server.ollama import OLLAMA_KINDS
from edgeinfer.openai.errors import RequestError
from tests.apps.server.client_types import REQUESTS, requests_of
from tests.apps.server.served import Local
from tests.docs.pages import DOCS
from tests.speculation import needs_builtin

pytestmark = needs_builtin

KINDS = {f"/v1{path}": kind for path, kind in OPENAI_KINDS.items()} | dict(ANTHROPIC_KINDS) | dict(OLLAMA_KINDS)


def documented() -> list[tuple[set[str], str]]:
    """The fields and the reason of each row of the reference's table."""
    text = (DOCS / "reference" / "server.md").read_text()
    table = text.partition("| refused field |")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return [(set(re.findall("`([^`]+)`", row[0])), row[-1]) for row in rows]


def reason_of(error: RequestError, table: list[tuple[set[str], str]]) -> int | None:
    """The place of the row that gives the reason of a refusal."""
    field = re.sub(r"\[\d+\]", "[]", error.param or "")
    return next((place for place, (fields, why) in enumerate(table) if field in fields and why in str(error)), None)


def test_requests_of_the_official_clients_types(server: Local) -> None:
    """Every refusal has a row in the reference's table, and every row a refusal."""
    model, table = server.host.model, documented()
    assert model is not None
    used: set[int | None] = set()
    for path, kind in KINDS.items():
        for body in requests_of(path, depth=1):
            try:
                completion = kind.make(dict(body), model)
                completion.check(model)
                completion.prepare(model)
            except RequestError as error:
                place = reason_of(error, table)
                assert place is not None, (path, body, error.param, str(error))
                used.add(place)
    assert used == set(range(len(table))), [row for place, row in enumerate(table) if place not in used]


@pytest.mark.slow
@pytest.mark.parametrize("path", REQUESTS)
def test_all_requests_of_the_official_clients_types(server: Local, path: str) -> None:
    """Every field of inner objects too, over HTTP to the end of the answer."""
    reasons = [why for _, why in documented()]
    for body in requests_of(path, depth=4):
        short = {"n": 3} if body.get("n") == 128 else {}
        short |= {"options": {"num_predict": 1} | body["options"]} if body.get("options") else {}
        answer = server.post(path, body | short)
        assert answer.status_code in (200, 400), (path, body, answer.text)
        if answer.status_code == 400:
            assert any(why in message_of(answer.json()) for why in reasons), (path, body, answer.text)
        elif "text/event-stream" in answer.headers["content-type"]:
            assert '"error"' not in answer.text, (path, body, answer.text)


def message_of(answer: Mapping[str, Any]) -> str:
    """What an error says, in any protocol."""
    error = answer["error"]
    return str(error["message"] if isinstance(error, dict) else error)
