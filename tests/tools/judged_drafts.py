"""What lossy verifications cost and gain: right answers and how likely the model finds them, by priced costs.

    python -m tests.tools.judged_drafts BUNDLE QUESTIONS [--temps 0,0.8] [--most N]

QUESTIONS has a question on each line as `edgeinfer tune --judge` reads them, other than the judge was taught on. The
drafter inside the bundle drafts for each rule; "drafter" answers alone. A row has the share of right answers, or of
words, with two standard errors, the log-probability of a token by the model, and passes at the prices of
`priced_drafting`, whose drafts are governed by them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any
from unittest.mock import patch

import edgeinfer
from edgeinfer.apps.bench.render import markdown_table
from edgeinfer.runtime.research.judge import RightReply, read_questions
from edgeinfer.runtime.speculation.device import DeviceCosts
from edgeinfer.runtime.speculation.governor import Governor
from tests.tools.priced_drafting import CURVE, Pricing, Reckoned

_RULES = ("keyed", "typical", "judge")
_LONGEST = 200


def _row(
    models: tuple[edgeinfer.Model, edgeinfer.Model],
    asked: Sequence[RightReply],
    now: Reckoned,
    options: Mapping[str, Any],
) -> tuple[str, ...]:
    """Answers with the first model, judged by the second."""
    model, judge = models
    right, likely, speedups, tokens, passes = list[float](), list[float](), list[float](), 0, 0
    for question in asked:
        prompt = judge.tokenize_chat(question.messages)
        now.tokens, now.passes, now.ms = 0, 0, 0.0
        reply = model.generate(prompt, max_tokens=min(_LONGEST, judge.context - len(prompt)), **options)
        if now.ms:
            speedups.append(now.speedup)
            tokens, passes = tokens + now.tokens, passes + now.passes
        right.append(question.share(reply.text))
        likely.extend(judge.score([*prompt, *reply.token_ids]).logprobs[len(prompt) - 1 :])
    error = 2 * pstdev(right) / math.sqrt(len(right))
    shares = f"{fmean(right):.0%} ±{error:.0%} of {len(right)}", f"{fmean(likely):.3f}"
    return (*shares, f"{tokens / passes:.2f}", f"{fmean(speedups):.2f}") if passes else (*shares, "", "")


def main() -> None:
    """Prints a table for each temperature."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--temps", default="0,0.8")
    parser.add_argument("--most", type=int, default=100, metavar="N", help="questions of each kind")
    args = parser.parse_args()
    pricing = Pricing(CURVE, 0.5, Reckoned())
    replaced = {(DeviceCosts, "of"): pricing.of, (DeviceCosts, "learn"): pricing.learn}
    replaced |= {(Governor, "observe"): pricing.observe, (Governor, "rested"): pricing.rested}  # type: ignore[dict-item]
    for (owner, name), method in replaced.items():
        patch.object(owner, name, lambda self, *given, method=method: method(self, *given)).start()
    asked = dict[str, list[RightReply]]()
    for question in read_questions(args.questions.read_text("utf-8")):
        asked.setdefault(question.kind, []).append(question)
    whole = edgeinfer.load(args.bundle, threads=1, remember=False)
    other = edgeinfer.load(args.bundle, threads=1, remember=False, speculation="off")
    small = edgeinfer.load(args.bundle / "drafter", threads=1, remember=False, speculation="off")
    with whole as model, other as judge, small as drafter:
        for temperature in map(float, args.temps.split(",")):
            rows = []
            for kind, questions in asked.items():
                drawn: dict[str, Any] = {"temperature": temperature, "seed": 1}
                for rule in _RULES:
                    options = drawn | {"speculation": "model", "verification": rule}
                    rows.append((kind, rule, *_row((model, judge), questions[: args.most], pricing.now, options)))
                alone = _row((drafter, judge), questions[: args.most], Reckoned(), drawn | {"speculation": "off"})
                rows.append((kind, "drafter", *alone))
            print(f"\ntemperature {temperature:g}\n")
            print(markdown_table(("kind", "rule", "right", "log-probability", "tokens a pass", "times plain"), rows))


if __name__ == "__main__":
    main()
