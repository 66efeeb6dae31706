"""`edgeinfer run`: answers one prompt."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import edgeinfer
from edgeinfer.apps.cli.inputs import engine_of, engine_words, is_piped, read_stdin, read_text, utf8
from edgeinfer.apps.cli.options import (
    add_generation_options,
    add_load_options,
    generation_options,
    load_model,
    load_options,
    reads_stdin,
)
from edgeinfer.apps.cli.output import print_json, print_note
from edgeinfer.apps.cli.parser import add_command, add_hide_option, add_json_option
from edgeinfer.apps.cli.process import end_start
from edgeinfer.apps.terminal.endings import EndingHints, ShownReply, cancel_on_interrupt, ending
from edgeinfer.core.errors import PromptError, TemplateError, UsageError
from edgeinfer.core.options import format_size
from edgeinfer.core.options.reply import ReplyOptions

if TYPE_CHECKING:
    from edgeinfer import Model, Result, TokenStream
    from edgeinfer.apps.cli.parser import Parser, Subparsers


_DESCRIPTION = """\
Answer a prompt, or continue it with --raw, and print the text as it is made. Without -m the small built-in model tells
stories.

examples:
  edgeinfer run "Once upon a time"
  edgeinfer run -m qwen2.5-0.5b "What is a quark?" --memory 1GB
  cat notes.txt | edgeinfer run -m qwen2.5-0.5b -p "Summarize:"
"""
# Default of -n: enough for nearly every answer; a continued text may never end.
_ANSWER, _CONTINUATION = 1024, 128
# Tokens of a chat template and its default system message.
_TEMPLATE = 128


def add_run(commands: Subparsers) -> None:
    parser = add_command(commands, "run", execute, _DESCRIPTION)
    parser.set_defaults(ends_start=True)
    _add_prompt_options(parser)
    add_load_options(parser, remote=True)
    limit = f"{_ANSWER}, with --raw {_CONTINUATION}"
    add_generation_options(parser, limit)
    add_json_option(parser)
    add_hide_option(parser)
    parser.advanced("--hide-thinking")
    parser.add_argument("-v", "--verbose", action="store_true", help="print speed and memory use on stderr at the end")


def _add_prompt_options(parser: Parser) -> None:
    group = parser.add_argument_group("prompt, followed by any piped text")
    group.add_argument("words", nargs="*", metavar="PROMPT", help="prompt to answer")
    group.add_argument("-p", "--prompt", metavar="TEXT", help="prompt as an option")
    group.add_argument("-f", "--file", metavar="FILE", help="UTF-8 file to add to the prompt; - reads stdin")
    context = "text file to read before the prompt, kept read for the next time; may be given again for others"
    group.add_argument("--context-file", metavar="FILE", action="append", help=context)
    group.add_argument("--system", metavar="TEXT", help="system message that tells the model how to behave")
    text = "continue the prompt instead of answering it, as models without a chat template always do"
    group.add_argument("--raw", action="store_true", help=text)


def execute(args: argparse.Namespace) -> int:
    if args.system is not None and args.raw:
        raise UsageError("--system is for answers, and --raw continues text.", "Leave one of them out.")
    system = None if args.system is None else utf8(args.system, "--system")
    options = generation_options(args)
    loading = load_options(args)
    config = ReplyOptions.of(**options)
    if config.follows_grammar:
        loading.setdefault("structured", True)
    prompt = _prompt(args)
    text = prompt if system is None else f"{system}\n{prompt}"
    with _roomy_model(args, loading, text, options.get("max_tokens") or _ANSWER) as model:
        context, answers = model.context, _answers(args, model)
        options.setdefault("max_tokens", _ANSWER if answers else _CONTINUATION)
        behind = model.with_contexts(args.context_file) if args.context_file else model
        source = behind.chat(system=system) if answers else behind
        stream = source.stream(prompt, **options)
        end_start()
        # Programs that read structured output want nothing before it.
        before = "" if answers or config.follows_grammar or config.choices else prompt
        with stream, cancel_on_interrupt(stream) as interrupt:
            if args.json:
                stream.complete()
            else:
                _write(stream, before, thoughts=not args.hide_thinking)
            result = stream.result
    if args.json:
        print_json(result.to_dict())
    else:
        _write_others(result, after=before)
        instead = "--raw continues text" if answers else "without --raw it answers" if args.raw else ""
        note = ending(result, options["max_tokens"], EndingHints("-n for more", "-c for more", instead))
        if note:
            print_note(note)
        if args.verbose or sys.stderr.isatty():
            engine = engine_of(args.model, loading)
            print_note(_summary(result, context) + (f", {engine_words(engine)}" if engine else ""))
    return 130 if interrupt.pressed else 0


def _roomy_model(args: argparse.Namespace, loading: dict[str, Any], text: str, reply: int) -> Model:
    """Load the model, with a longer context than the default if this text needs it and memory allows."""
    model = load_model(args.model, loading)
    # A token has at least one byte.
    if "context" in loading or len(text.encode()) + reply <= model.context:
        return model
    needed = len(model.tokenize(text)) + reply + _TEMPLATE
    roomy = {**loading, "context": min(needed, edgeinfer.describe(args.model).context)}
    if roomy["context"] <= model.context:
        return model
    model.close()
    from edgeinfer.hub.catalog_models import room

    plan = edgeinfer.plan(args.model, **roomy)
    fits = plan.fits and plan.planned_bytes <= room(loading.get("memory"))
    return load_model(args.model, roomy if fits else loading)


def _prompt(args: argparse.Namespace) -> str:
    """Join the given parts of the prompt by empty lines: words or -p, then -f, then piped text."""
    if len(args.words) > 1 or (args.words and _is_model(args.words[0])):
        raise _not_a_prompt(args.words)
    if args.words and args.prompt is not None:
        raise UsageError("There are two prompts.", "Give one, with -p or without.")
    parts = [utf8(args.words[0] if args.words else args.prompt, "The prompt")] if args.words or args.prompt else []
    if args.file is not None:
        parts.append(read_stdin() if args.file == "-" else read_text(Path(args.file)))
    given = bool(parts) or args.prompt is not None
    if args.file == "-" and reads_stdin(args):
        raise UsageError("stdin can be read only once.", "Put one of the two into a file.")
    piped = is_piped() if given else sys.stdin is not None and not sys.stdin.isatty()
    if piped and args.file != "-" and not reads_stdin(args):
        parts.append(read_stdin(waiting="Reading more of the prompt from stdin; < /dev/null leaves it out."))
    prompt = "\n\n".join(part for part in parts if part)
    if not prompt:
        message = "The prompt is empty." if given or args.file else "There is no prompt."
        raise PromptError(message, 'Write one: edgeinfer run "Once upon a time". To talk: edgeinfer chat')
    return prompt


def _is_model(word: str) -> bool:
    from edgeinfer import hub  # keeps --help fast

    return len(word.split()) == 1 and hub.catalog_model(word) is not None


def _not_a_prompt(words: list[str]) -> UsageError:
    rest = " ".join(words[1:]) or "Hello"
    if "/" in words[0] or Path(words[0]).exists() or _is_model(words[0]):
        return UsageError("Models are named with -m.", f'Did you mean: edgeinfer run -m {words[0]} "{rest}"?')
    return UsageError("The prompt must be one argument.", f'Put it in quotes: edgeinfer run "{words[0]} {rest}"')


def _answers(args: argparse.Namespace, model: Model) -> bool:
    """Whether to use the model's chat template."""
    if args.raw:
        return False
    if model.chat_template_text is not None:
        return True
    if args.system is not None:
        message = f"{model.info.name} has no chat template, which --system needs."
        raise TemplateError(message, "Leave it out: the model then continues the prompt.")
    return False


def _write_now(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _write(stream: TokenStream, after: str, thoughts: bool) -> None:
    """Write the reply after the prompt that it continues."""
    sys.stdout.write(after)
    last = after
    shown = ShownReply(sys.stdout, _write_now, thoughts=thoughts)
    for chunk in stream:
        shown.add(chunk.reasoning, chunk.text)
        last = chunk.text or last
    shown.end_thought()
    if not last.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()


def _write_others(result: Result, after: str) -> None:
    """Write the further samples."""
    samples = result.search.texts if result.search is not None and result.search.search == "samples" else ()
    for number, sample in enumerate(samples[1:], 2):
        print(f"\n[sample {number}]\n{after}{sample.text.rstrip()}")


def _summary(result: Result, context: int) -> str:
    memory = f"peak memory {format_size(result.memory.peak_rss_bytes)}, context {context} tokens"
    if not result.usage.completion_tokens:
        return f"0 tokens, {memory}"
    drafting = result.speculation
    lossy = _lossy(result)
    drafts = f", {drafting.mean_accepted_length:.1f} tokens per pass" if drafting.rounds else ""
    return (
        f"{result.usage.completion_tokens} tokens, {result.timings.tokens_per_second:.1f} tok/s{drafts}{lossy}, "
        f"first token after {result.timings.ttft_ms:.0f} ms, {memory}"
    )


def _lossy(result: Result) -> str:
    """Describe the lossy methods used, if any."""
    use, contexts = result.compute, result.contexts
    if contexts is not None and not contexts.lossless:
        return f", lossy ({contexts.contexts} contexts evaluated apart)"
    if use is None or use.lossless:
        return ""
    what = f"{use.reduced / use.tokens:.0%} of them by {use.compute}"
    measured = "" if use.divergence is None else f", {use.divergence:.3f} nats from the whole model"
    return f", lossy ({what}{measured})"
