"""`edgeinfer serve`: a model behind the HTTP APIs that other programs know."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.apps.cli.inputs import prepared, read_text
from edgeinfer.apps.cli.options import add_load_options, load_options
from edgeinfer.apps.cli.output import abandon_stdout
from edgeinfer.apps.cli.parser import add_command, add_json_option
from edgeinfer.core.options import format_size, options_of, parse_size
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.core.user_files import user_data

if TYPE_CHECKING:
    from edgeinfer import Model
    from edgeinfer.apps.cli.parser import Parser, Subparsers
    from edgeinfer.apps.server.security import ApiKey


_DESCRIPTION = """\
Serve a model to other programs through the APIs that they know: OpenAI's (/v1), Ollama's (/api), Anthropic's
(/v1/messages) and that of llama.cpp's server (/completion and others). Ctrl-C ends it.

Only programs of this machine reach it. To let others, bind it with --host and give it an API key, in a file or in
EDGEINFER_API_KEY; there is no encryption: put a proxy in front for that.

examples:
  edgeinfer serve
  edgeinfer serve -m my-bundle --memory 600MB --port 8081
  curl http://127.0.0.1:8080/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello"}]}'
"""
_KEY_VARIABLE = "EDGEINFER_API_KEY"


def add_serve(commands: Subparsers) -> None:
    parser = add_command(commands, "serve", execute, _DESCRIPTION)
    _add_server_options(parser)
    parser.advanced("--parallel", "--queue", "--alias", "--allow-origin", "--allow-host", "--max-body")
    parser.advanced("--inter-token-latency", "--sse-ping-interval", "--idle-unload", "--context-file", "--responses")
    parser.advanced("--downloads", "--embedding-model", "--verbose")
    add_load_options(parser, remote=True)
    add_json_option(parser)


def _add_server_options(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    text = "address to listen on; any but this machine's loopback needs an API key (default: 127.0.0.1)"
    group.add_argument("--host", default="127.0.0.1", metavar="NAME", help=text)
    group.add_argument(
        "--port", type=int, default=8080, metavar="N", help="port to listen on; 0 picks a free one (default: 8080)"
    )
    text = "number of replies generated at once, if --memory has room for them (default: 8)"
    group.add_argument("--parallel", type=int, default=8, metavar="N", help=text)
    text = "number of requests that may wait beyond these (default: 64)"
    group.add_argument("--queue", type=int, default=64, metavar="N", help=text)
    text = options_of(LoadOptions)["inter_token_latency"].help
    group.add_argument("--inter-token-latency", type=float, metavar="MS", help=text)
    text = "additional name for the model in requests; can be repeated"
    group.add_argument("--alias", action="append", default=[], metavar="NAME", help=text)
    text = "on: load another model on this machine when a request names it, one at a time; off: serve only this one"
    group.add_argument("--models", choices=("on", "off"), default="on", help=f"{text} (default: on)")
    text = "on: clients may have models of the catalog and the hub fetched (default: off)"
    group.add_argument("--downloads", choices=("on", "off"), default="off", help=text)
    text = "on: keep responses, at most 64 MB, in a private file, so that requests to /v1/responses may continue them"
    text += "; off, or --no-remember: keep none (default: on)"
    group.add_argument("--responses", choices=("on", "off"), default="on", help=text)
    text = "model that makes embeddings or scores for /v1/embeddings and /v1/rerank next to it; can be repeated"
    group.add_argument("--embedding-model", action="append", default=[], metavar="MODEL", help=text)
    text = "text file that requests may name in `contexts`, which the model reads once; can be repeated"
    group.add_argument("--context-file", type=Path, action="append", default=[], metavar="FILE", help=text)
    text = "unload the model after this many seconds without a request; the next one loads it again (default: never)"
    group.add_argument("--idle-unload", type=float, metavar="SECONDS", help=text)
    text = "file with the API key that requests must carry, or more, one a line; KEY requests=60 tokens=9000 limits one"
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help=f"{text} by the minute")
    text = "origin whose pages may use the server, such as https://example.com; can be repeated"
    group.add_argument("--allow-origin", action="append", default=[], metavar="ORIGIN", help=text)
    text = "host name that requests may use besides localhost; can be repeated"
    group.add_argument("--allow-host", action="append", default=[], metavar="NAME", help=text)
    text = "maximum size of a request body (default: 4MB)"
    group.add_argument("--max-body", type=parse_size, default=parse_size("4MB"), metavar="SIZE", help=text)
    text = "seconds of silence after which a stream sends a keep-alive comment (default: 10)"
    group.add_argument(
        "--sse-ping-interval", dest="comment_seconds", type=float, default=10.0, metavar="SECONDS", help=text
    )
    text = "log the method, path and status of requests on stderr, but never their content"
    group.add_argument("-v", "--verbose", action="store_true", help=text)


def execute(args: argparse.Namespace) -> int:
    import asyncio  # 4 MB that other commands save

    from edgeinfer.apps.server.app import make_app
    from edgeinfer.apps.server.embeddings import Embedders
    from edgeinfer.apps.server.host import ModelHost
    from edgeinfer.apps.server.responses import ResponseStore
    from edgeinfer.apps.server.security import Security
    from edgeinfer.apps.server.serving import Server
    from edgeinfer.apps.server.switching import ModelSwitch

    name, options = prepared(args.model, load_options(args))
    own = {"idle_unload": args.idle_unload, "inter_token_latency": args.inter_token_latency}
    options |= {option: value for option, value in own.items() if value is not None}
    security = Security(
        host=args.host,
        allowed_hosts=tuple(args.allow_host),
        allowed_origins=tuple(args.allow_origin),
        api_keys=_api_keys(args.api_key_file),
        max_body=args.max_body,
        comment_seconds=args.comment_seconds,
    ).within(args.memory)
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    level = logging.DEBUG if args.debug else logging.INFO if args.verbose else logging.WARNING
    logging.getLogger("edgeinfer.server").setLevel(level)
    host = ModelHost(parallel=args.parallel, queue=args.queue)
    urls: list[str] = []
    switch = ModelSwitch(host, name, options, queue=args.queue) if args.models == "on" else None

    embedders = Embedders(args.embedding_model, {"threads": args.threads} if args.threads else {})

    async def load() -> None:
        await asyncio.to_thread(embedders.load)
        model = await host.load(name, options)
        if switch is not None:
            switch.opened = True
        _announce(urls[0], model, as_json=args.json)

    async def stop() -> None:
        if switch is not None:
            await switch.close()
        host.cancel_load()
        await host.unload()

    keeps = args.responses == "on" and options.get("remember", True)
    store = ResponseStore(user_data() / "edgeinfer" / "responses") if keeps else None
    kept: dict[str, Any] = {
        "contexts": args.context_file,
        "embedders": embedders,
        "store": store,
        "downloads": args.downloads == "on",
    }
    app = make_app(host, security, aliases=args.alias, switch=switch, **kept)
    Server(app, args.host, args.port, ready=urls.append, alongside=load, stopping=stop).run()
    return 0


def _api_keys(file: Path | None) -> tuple[ApiKey, ...]:
    """Read the keys of the file, else of the environment."""
    from edgeinfer.apps.server.security import ApiKey, parse_keys

    if file is None:
        key = os.environ.get(_KEY_VARIABLE)
        return (ApiKey(key),) if key else ()
    return parse_keys(read_text(file), str(file))


def _announce(url: str, model: Model, *, as_json: bool) -> None:
    """Print the server's address once it has a model."""
    planned = model.plan.planned_bytes
    if as_json:
        data = {"url": url, "model": model.info.name, "context": model.context, "planned_bytes": planned}
        line = json.dumps(data | {"pid": os.getpid()})
    else:
        line = f"{model.info.name} is served at {url} (context {model.context}, {format_size(planned)} planned)"
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the parent no longer reads; clients may still connect
        abandon_stdout()
