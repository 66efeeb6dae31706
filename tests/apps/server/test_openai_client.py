"""The official `openai` client against a real server: every endpoint, streamed and whole, and its errors."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import edgeinfer
from edgeinfer.apps.server.security import ApiKey, Security
from tests.apps.server.served import MESSAGES, Local, held, served
from tests.speculation import needs_builtin
from tests.tables import each_row
from tests.waiting import wait_until

openai = pytest.importorskip("openai", reason="the official client is not installed")

pytestmark = needs_builtin

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def client(server: Local) -> Any:
    with openai.OpenAI(base_url=server.api, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model() -> Any:
    with edgeinfer.load(threads=1) as model:
        yield model


def test_models(client: Any) -> None:
    names = [model.id for model in client.models.list()]
    assert names == ["tales", "small"]
    assert client.models.retrieve("small").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


@each_row("name", ["tales", "small"])
def test_chat(client: Any, model: edgeinfer.Model, name: str) -> None:
    answer = client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=24)
    expected = model.stream_chat(MESSAGES, max_tokens=24).complete()
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.usage.total_tokens == 24 + answer.usage.prompt_tokens
    timings = answer.model_extra["timings"]
    assert timings["predicted_n"] == 24
    assert {"draft_n", "draft_n_accepted", "prompt_ms", "predicted_per_second", "cache_n"} <= set(timings)


def test_chat_stream(client: Any, model: edgeinfer.Model) -> None:
    stream = client.chat.completions.create(
        model="tales", messages=MESSAGES, max_tokens=24, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == model.stream_chat(MESSAGES, max_tokens=24).complete().text
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].usage.completion_tokens == 24
    assert len({chunk.id for chunk in chunks}) == 1


def test_parsed_by_pydantic(client: Any) -> None:
    pydantic = pytest.importorskip("pydantic")
    animal = pydantic.create_model("Animal", kind=(str, pydantic.Field(pattern="^(dog|cat)$")), legs=(int, ...))
    answer = client.chat.completions.parse(model="tales", messages=MESSAGES, max_tokens=100, response_format=animal)
    assert answer.choices[0].message.parsed.kind in ("dog", "cat")


def test_tools(client: Any) -> None:
    answer = client.chat.completions.create(
        model="tales",
        messages=MESSAGES,
        max_tokens=100,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    call = choice.message.tool_calls[0]
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    follow = [
        *MESSAGES,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    after = client.chat.completions.create(model="tales", messages=follow, tools=[WEATHER], max_tokens=8)
    assert after.choices[0].finish_reason


def test_completions(client: Any, model: edgeinfer.Model) -> None:
    prompt = "Once upon a time"
    expected = model.generate(prompt, max_tokens=20).text
    answer = client.completions.create(model="tales", prompt=prompt, max_tokens=20, temperature=0)
    assert answer.choices[0].text == expected
    stream = client.completions.create(model="tales", prompt=prompt, max_tokens=20, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == expected
    echoed = client.completions.create(model="tales", prompt=prompt, max_tokens=4, temperature=0, echo=True)
    assert echoed.choices[0].text.startswith(prompt)
    scored = client.completions.create(model="tales", prompt=prompt, max_tokens=4, temperature=0, logprobs=2)
    assert len(scored.choices[0].logprobs.token_logprobs) == 4
    asked = {"model": "tales", "prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1}
    alone = client.completions.create(**asked).choices[0].logprobs.token_logprobs
    with ThreadPoolExecutor() as pool:  # between other replies
        others = [pool.submit(client.completions.create, model="tales", prompt=prompt, max_tokens=20) for _ in range(4)]
        shared = client.completions.create(**asked).choices[0].logprobs.token_logprobs
        assert {other.result().choices[0].text for other in others} == {expected}
    assert shared == alone and alone[0] is None and max(alone[1:]) < 0


def test_responses(client: Any) -> None:
    answer = client.responses.create(model="tales", input="Tell me about a little dog.", max_output_tokens=16)
    assert answer.output_text
    assert answer.usage.output_tokens == 16
    kinds, text = [], ""
    for event in client.responses.create(
        model="tales", input="Tell me about a little dog.", max_output_tokens=16, stream=True
    ):
        kinds.append(event.type)
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert text == answer.output_text


def test_errors_before_the_stream_have_their_status(client: Any) -> None:
    long = [{"role": "user", "content": "dog " * 5000}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tales", messages=long, stream=stream)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tales", messages=MESSAGES, temperature=-1, stream=stream)
        assert "temperature" in caught.value.message


def test_many_at_once_each_get_their_own(server: Local, model: edgeinfer.Model) -> None:
    asked = [[{"role": "user", "content": f"A story about {what}."}] for what in ("a dog", "a cat", "Tom", "the sea")]
    expected = [model.stream_chat(messages, max_tokens=30).complete().text for messages in asked]

    async def one(client: Any, messages: Any) -> str:
        stream = await client.chat.completions.create(model="tales", messages=messages, max_tokens=30, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.api, api_key="none", max_retries=0) as client:
            return list(await asyncio.gather(*(one(client, messages) for messages in asked * 2)))

    assert asyncio.run(run()) == expected * 2


@pytest.mark.slow
def test_several_replies_and_searches_share_passes_with_others(
    server: Local, model: edgeinfer.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each client gets the text that the model alone gives."""
    greedy: dict[str, Any] = {"max_tokens": 24}
    sampled = greedy | {"temperature": 0.9, "seed": 3}
    ways: list[dict[str, Any]] = [
        greedy,
        sampled,
        {"search": "samples", "samples": 3} | sampled,
        {"search": "vote", "samples": 3} | sampled,
        {"search": "beam", "beams": 3} | greedy,
        {"search": "momentum"} | greedy,
    ]
    expected = [[model.stream_chat(MESSAGES, **options).complete().text] for options in ways]
    several = [model.stream_chat(MESSAGES, **sampled | {"seed": 3 + place}).complete().text for place in range(3)]
    most, step = 0, edgeinfer.ReplyBatch.step

    def noted(batch: edgeinfer.ReplyBatch) -> bool:
        nonlocal most
        most = max(most, batch.running)
        return step(batch)

    monkeypatch.setattr(edgeinfer.ReplyBatch, "step", noted)

    async def ask(client: Any, n: int, stream: bool, options: dict[str, Any]) -> list[str]:
        asked: dict[str, Any] = {"model": "tales", "messages": MESSAGES, "n": n, "extra_body": options}
        made = await client.chat.completions.create(stream=stream, **asked)
        if not stream:
            return [choice.message.content for choice in made.choices]
        texts = [""] * n
        async for chunk in made:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        return texts

    async def run() -> list[list[str]]:
        async with openai.AsyncOpenAI(base_url=server.api, api_key="none", max_retries=0) as client:
            with held(server.host):
                asked = [asyncio.create_task(ask(client, 3, stream, sampled)) for stream in (False, True)]
                asked += [asyncio.create_task(ask(client, 1, place % 2 == 0, way)) for place, way in enumerate(ways)]
                all_asked = 2 * 3 + len(ways)
                await asyncio.to_thread(
                    wait_until, lambda: server.host.running + server.host.waiting == all_asked, "all asked"
                )
            return await asyncio.gather(*asked)

    assert asyncio.run(run()) == [several, several, *expected]
    assert most == server.host.parallel


def test_a_key(caplog: pytest.LogCaptureFixture) -> None:
    key = "a-key-of-some-length"
    caplog.set_level("DEBUG", "edgeinfer.server")
    with served(security=Security(api_keys=(ApiKey(key),)), context=64, speculation="off") as server:
        with openai.OpenAI(base_url=server.api, api_key=key) as client:
            assert client.models.list().data
        caplog.clear()
        with openai.OpenAI(base_url=server.api, api_key="wrong-key-of-theirs", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                client.models.list()
            with pytest.raises(openai.AuthenticationError):
                client.chat.completions.create(model="tales", messages=MESSAGES)
    logged = [record.getMessage() for record in caplog.records if record.name.startswith("edgeinfer")]
    assert logged and not any(key in line or "wrong-key" in line for line in logged)
