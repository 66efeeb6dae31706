"""The model as an MCP server, for programs that speak the protocol: it answers, fills in a schema, and chooses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mcp.server.mcpserver import Context, MCPServer

from edgeinfer.openai.schemas import closed

if TYPE_CHECKING:
    from edgeinfer import Model

_INSTRUCTIONS = (
    "A language model that runs on this machine: nothing that it is asked leaves it. It keeps no conversation."
)
_EVERY = 16  # tokens between two reports of progress, which keep clients from giving up


class OfferedModel:
    """Answers calls by one model, which is loaded while clients connect; calls take turns as its scheduler has it."""

    def __init__(self, load: Callable[[], Model], options: Mapping[str, Any]) -> None:
        self._options = options
        self._loading = asyncio.ensure_future(asyncio.to_thread(load))

    async def answer(self, question: str, system: str, progress: Callable[[int], Any], **options: Any) -> str:
        """Answer a message."""
        model = await self._loading
        said: list[str] = []
        count = 0
        async with model.chat(system or None).astream(question, **{**self._options, **options}) as stream:
            async for chunk in stream:
                said.append(chunk.text)
                before, count = count, count + len(chunk.token_ids)
                if before // _EVERY != count // _EVERY:
                    await progress(count)
        return "".join(said)

    async def facts(self) -> dict[str, Any]:
        """What the model is."""
        model = await self._loading
        info = model.info
        facts = {"name": info.name, "parameters": info.parameters, "bits_per_weight": info.bits_per_weight}
        return facts | {"context": model.context, "memory_bytes": model.plan.planned_bytes}

    async def close(self) -> None:
        if not self._loading.cancel():
            (await self._loading).close()


def make_server(offered: OfferedModel) -> Any:
    """The server with its tools; their signatures and docstrings are what clients are shown."""
    server = MCPServer("edgeinfer", instructions=_INSTRUCTIONS)

    def progress(context: Context) -> Callable[[int], Any]:
        return lambda count: context.report_progress(count)

    async def ask(ctx: Context, question: str, system: str = "", max_tokens: int = 1024) -> str:
        """Ask the local language model. `system` tells it how to behave; it sees nothing of other calls."""
        return await offered.answer(question, system, progress(ctx), max_tokens=max_tokens)

    async def extract(ctx: Context, text: str, schema: dict[str, Any], instruction: str = "") -> str:
        """Have the local model read a text and fill in a JSON Schema. The answer always follows the schema."""
        asked = f"{instruction or 'Extract what the schema asks for, as JSON.'}\n\n{json.dumps(schema)}\n\n{text}"
        return await offered.answer(asked, "", progress(ctx), json_schema=closed(schema), temperature=0.0)

    async def choose(ctx: Context, question: str, choices: list[str]) -> str:
        """Have the local model answer with one of the choices, and nothing else."""
        return await offered.answer(question, "", progress(ctx), choices=choices, temperature=0.0)

    async def about() -> dict[str, Any]:
        """The local model: name, parameters, bits of a weight, context in tokens, memory."""
        return await offered.facts()

    for tool in (ask, extract, choose, about):
        server.add_tool(tool)
    return server


async def serve(load: Callable[[], Model], options: Mapping[str, Any]) -> None:
    """Answer a client on stdin and stdout until it leaves."""
    offered = OfferedModel(load, options)
    try:
        await make_server(offered).run_stdio_async()
    finally:
        await offered.close()
