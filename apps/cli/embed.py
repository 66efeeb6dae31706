"""`edgeinfer embed`: vectors of texts, or documents ranked for a query, in lines of JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.apps.cli.inputs import read_stdin, read_text, utf8
from edgeinfer.apps.cli.options import add_load_options, load_model, load_options
from edgeinfer.apps.cli.parser import add_command
from edgeinfer.core.errors import UsageError

if TYPE_CHECKING:
    from edgeinfer import Model
    from edgeinfer.apps.cli.parser import Subparsers


_DESCRIPTION = """\
Print the embedding of each text as a line of JSON: {"index": 0, "embedding": [...]}. Texts are arguments, or the lines
of a file or of stdin; a line may be JSON, a string or an object with "text". With --query the texts are documents,
which a reranker scores; the best comes first.

examples:
  edgeinfer embed -m all-minilm-l6-v2 "A cat sat on the mat." "The weather is fine."
  edgeinfer embed -m all-minilm-l6-v2 -f texts.txt > vectors.jsonl
  edgeinfer embed -m bge-reranker-v2-m3 --query "capital of France" -f passages.txt
"""
# Texts that are tokenized and evaluated before their lines are printed.
_TOGETHER = 256


def add_embed(commands: Subparsers) -> None:
    parser = add_command(commands, "embed", execute, _DESCRIPTION)
    group = parser.add_argument_group("texts")
    group.add_argument("texts", nargs="*", metavar="TEXT", help="text to embed")
    group.add_argument("-f", "--file", metavar="FILE", help="UTF-8 file with a text in each line; - reads stdin")
    group.add_argument("--prompt", metavar="NAME", help="name of the model's prompt for the texts, such as query")
    group.add_argument("--dimensions", type=int, metavar="N", help="print the first N dimensions only")
    group.add_argument("--truncate", action="store_true", help="leave out the end of texts that are too long")
    group.add_argument("--query", metavar="TEXT", help="rank the texts for this query")
    group.add_argument("--top", type=int, metavar="N", help="with --query, print the N best only")
    add_load_options(parser)


def execute(args: argparse.Namespace) -> int:
    texts = [utf8(text, "TEXT") for text in args.texts]
    if args.file is not None or not texts:
        texts += _lines(read_stdin() if args.file in (None, "-") else read_text(Path(args.file)))
    if not texts:
        raise UsageError("There is no text to embed.", "Give some, or a file with --file.")
    if args.query is not None and (args.prompt is not None or args.dimensions is not None):
        raise UsageError("--query ranks texts, which have no vectors then.", "Leave --prompt and --dimensions out.")
    with load_model(args.model, load_options(args)) as model:
        for line in _ranked(model, args, texts) if args.query is not None else _embedded(model, args, texts):
            sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    return 0


def _embedded(model: Model, args: argparse.Namespace, texts: list[str]) -> Iterator[dict[str, Any]]:
    for start in range(0, len(texts), _TOGETHER):
        options = {"prompt": args.prompt, "dimensions": args.dimensions, "truncate": args.truncate}
        vectors = model.embed(texts[start : start + _TOGETHER], **options).vectors
        yield from ({"index": start + place, "embedding": row.tolist()} for place, row in enumerate(vectors))


def _ranked(model: Model, args: argparse.Namespace, texts: list[str]) -> Iterator[dict[str, Any]]:
    ranking = model.rerank(utf8(args.query, "--query"), texts, top_n=args.top, truncate=args.truncate)
    for each in ranking.documents:
        yield {"index": each.index, "score": each.score, "text": texts[each.index]}


def _lines(contents: str) -> Iterator[str]:
    """Texts of lines; JSON where a line is a string or an object with a text."""
    for line in filter(str.strip, contents.splitlines()):
        try:
            value = json.loads(line) if line.lstrip()[0] in '"{' else line
        except ValueError:
            value = line
        text = value.get("text", line) if isinstance(value, dict) else value
        yield text if isinstance(text, str) else line
