"""Questions whose answer stands in a story: greedy replies beside the likeliest span of the story.

    python -m tests.tools.extraction DATA

DATA is the folder of the data sets; the built-in model answers. A final full stop makes no difference.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import edgeinfer

_TOKENS = 40


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    lines = (parser.parse_args().data / "tales_dialogues" / "dialogues.jsonl").read_text("utf-8").splitlines()
    model = edgeinfer.load(threads=1)
    for kind in ("who", "start"):
        asked = [line for line in map(json.loads, lines) if line["kind"] == kind]
        right, verbatim, passes = {"greedy": 0, "extract": 0}, {"greedy": 0, "extract": 0}, 0
        seconds = {"greedy": 0.0, "extract": 0.0}
        questions = 0
        for each in asked:
            story = each["messages"][1]["content"]
            prompt = model.tokenize_chat(each["messages"])
            if len(prompt) + _TOKENS > model.context:
                continue
            questions += 1
            for way in right:
                started = time.process_time()
                searched = {"search": "extract", "passage": story} if way == "extract" else {"speculation": "off"}
                result = model.generate(list(prompt), max_tokens=_TOKENS, **searched)
                seconds[way] += time.process_time() - started
                right[way] += result.text.strip(" .") == each["answer"].strip(" .")
                verbatim[way] += result.text in story
                passes += result.search.passes if result.search else 0
        for way in right:
            print(
                f"{kind} {way}: right {right[way]} of {questions}, verbatim {verbatim[way]}, "
                f"{seconds[way] / questions:.3f} s of processor time a question"
            )
        print(f"{kind}: {passes / questions:.1f} passes a question")


if __name__ == "__main__":
    _main()
