"""Requests choose an adapter as the model that they name, or by a field of its own."""

from __future__ import annotations

from pathlib import Path

import edgeinfer
from tests.apps.server.served import served
from tests.edgeinfer.test_adapters import PROMPT, write_adapter
from tests.kernel import require_kernel


def test_adapters_are_listed_and_chosen_by_model(tmp_path: Path) -> None:
    require_kernel()
    adapters = {"wild": write_adapter(tmp_path / "wild", 1, 16), "odd": write_adapter(tmp_path / "odd", 2, 5)}
    with edgeinfer.load(adapters=adapters, context=256) as model:
        expected = {n: model.generate(PROMPT, max_tokens=16, adapter=n).text for n in ("wild", "odd", None)}
    for models in (False, True):
        with served(adapters=adapters, context=256, models=models) as server:
            listed = [each["id"] for each in server.http.get(f"{server.url}/v1/models").json()["data"]]
            assert {"tales", "wild", "odd"} <= set(listed)
            asked = [({"model": "wild"}, "wild"), ({"model": "odd"}, "odd"), ({"model": "tales"}, None), ({}, None)]
            asked += [({"model": "tales", "adapter": "odd"}, "odd")]
            for fields, name in asked:
                body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, **fields}
                answer = server.http.post(f"{server.url}/v1/completions", json=body).json()
                assert answer["choices"][0]["text"] == expected[name], fields
            said = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
            assert server.http.post(f"{server.url}/v1/chat/completions", json=said | {"model": "odd"}).is_success
            wrong = server.http.post(f"{server.url}/v1/chat/completions", json=said | {"adapter": "mild"})
            assert wrong.status_code == 400 and "mild" in wrong.text
