"""Scores of models on tasks: HumanEval, MBPP, twelve plain questions, and how many replies repeat themselves.

    python -m tests.tools.task_scores MODEL ... [--humaneval FILE] [--mbpp FILE] [--items 164] [--json FILE]

Replies are greedy and share passes. HumanEval is continued as text, up to the end of the function; the rest are chats.
FILE is the data set's JSON lines, compressed or not. Generated code runs in a child process of limited time, memory
and files, without the network where `unshare` allows that: run it where nothing can be broken.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import edgeinfer
from edgeinfer.tools.checking import repeated

_LIMITS = {resource.RLIMIT_CPU: 6, resource.RLIMIT_AS: 1 << 30, resource.RLIMIT_FSIZE: 1 << 20}
_SECONDS = 12
_PARALLEL = 8
# What follows a function at the margin.
_ENDS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint", "\n```", "\nassert", "\n@", "\nfrom ", "\nimport ")
# Each with words of which the right answer has one.
QUESTIONS = {
    "What is the capital of France?": ("paris",),
    "What is 2 + 2?": ("4", "four"),
    "What color is the sky on a clear day?": ("blue",),
    "How many days are in a week?": ("seven", "7"),
    "Which planet do we live on?": ("earth",),
    "What is the opposite of hot?": ("cold",),
    "What do bees make?": ("honey",),
    "Who wrote Romeo and Juliet?": ("shakespeare",),
    "What is the largest ocean on Earth?": ("pacific",),
    "What gas do plants take in from the air?": ("carbon dioxide", "co2"),
    "In which country is Tokyo?": ("japan",),
    "What is water made of?": ("hydrogen", "h2o"),
}
OPEN = (
    "The capital of France is",
    "Write a short story about a fox.",
    "Explain why the sky is blue.",
    "Give me three tips for better sleep.",
    "Describe your favourite city.",
    "What is the difference between a cat and a dog?",
)
_REPEATED = 0.5


def passes(code: str) -> bool:
    """Whether a program ends without an error within its limits."""
    alone = ["unshare", "-rn"] if shutil.which("unshare") else []
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [*alone, sys.executable, "-I", "-S", "-c", code],
                cwd=folder,
                env={},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                preexec_fn=_limit,
                timeout=_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def _limit() -> None:
    for kind, most in _LIMITS.items():
        resource.setrlimit(kind, (most, most))


def humaneval(model: edgeinfer.Model, problems: Sequence[dict[str, Any]]) -> list[bool]:
    prompts = [each["prompt"] for each in problems]
    replies = model.generate_batch(prompts, parallel=_PARALLEL, max_tokens=256, temperature=0, stop=_ENDS)
    return [
        passes(f"{each['prompt']}{reply.text}\n{each['test']}\ncheck({each['entry_point']})\n")
        for each, reply in zip(problems, replies, strict=True)
    ]


def mbpp(model: edgeinfer.Model, problems: Sequence[dict[str, Any]]) -> list[bool]:
    tests = ["\n".join(each["test_list"]) for each in problems]
    asked = [
        f"{each['prompt']}\nYour code should pass these tests:\n{test}"
        for each, test in zip(problems, tests, strict=True)
    ]
    ids = [model.tokenize_chat([{"role": "user", "content": text}], prefill="```python\n") for text in asked]
    replies = model.generate_batch(ids, parallel=_PARALLEL, max_tokens=256, temperature=0, stop="\n```")
    return [passes(f"{reply.text}\n{test}\n") for reply, test in zip(replies, tests, strict=True)]


def answers(model: edgeinfer.Model, asked: Sequence[str], most: int) -> list[edgeinfer.Result]:
    """Greedy replies to questions, each a conversation of its own."""
    chats = [[{"role": "user", "content": text}] for text in asked]
    return model.chat_batch(chats, parallel=len(chats), max_tokens=most, temperature=0, repetition_penalty=1.0)


def scores(model: edgeinfer.Model, files: dict[str, Path], items: int) -> dict[str, Any]:
    """Right of all by task, and what was answered."""
    found: dict[str, Any] = {}
    for name, solve in (("humaneval", humaneval), ("mbpp", mbpp)):
        if name in files:
            right = solve(model, _read(files[name])[:items])
            found[name] = {"right": sum(right), "of": len(right), "solved": [i for i, ok in enumerate(right) if ok]}
    if files:
        return found
    replies = [reply.text for reply in answers(model, tuple(QUESTIONS), 40)]
    known = [
        any(word in text.lower() for word in words) for text, words in zip(replies, QUESTIONS.values(), strict=True)
    ]
    open_ended = answers(model, OPEN, 160)
    loops = [repeated(reply.token_ids) > _REPEATED for reply in open_ended]
    found["questions"] = {"right": sum(known), "of": len(known), "replies": replies}
    found["repeating"] = {"right": len(loops) - sum(loops), "of": len(loops), "replies": [r.text for r in open_ended]}
    return found


def _read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return [json.loads(line) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--humaneval", type=Path)
    parser.add_argument("--mbpp", type=Path)
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    files = {name: path for name in ("humaneval", "mbpp") if (path := getattr(args, name)) is not None}
    every = {}
    for name in args.models:
        with edgeinfer.load(name, speculation="off", remember=False, context=2048) as model:
            every[name] = scores(model, files, args.items)
        print(name, *(f"{task} {found['right']}/{found['of']}" for task, found in every[name].items()), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(every, indent=1))


if __name__ == "__main__":
    main()
