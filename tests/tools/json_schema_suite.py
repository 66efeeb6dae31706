"""Compare the documents that grammars of schemas accept with the verdicts of JSON Schema's official tests.

    python -m tests.tools.json_schema_suite CHECKOUT [DRAFT]
    python -m tests.tools.json_schema_suite JSONSCHEMABENCH

CHECKOUT is one of https://github.com/json-schema-org/JSON-Schema-Test-Suite. Each schema that is not refused is given
every document of its tests in several spellings: other blanks, every letter escaped, the last name twice, numbers and
the order of names otherwise. A document counts as taken where one of them is. Of jsonschemabench's .jsonl files, which
have no verdicts, the schemas that compile are counted.

Where the standard leaves a choice, `READINGS` says which documents that the suite calls valid must not be taken. They
are counted apart, and one that is taken counts as wrongly accepted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgeinfer.core.errors import GrammarError
from tests.runtime.sampling.json_texts import accepts, follow

DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
# By files of the suite: what a test's description and document have, and the choice.
READINGS = {
    "format": ("is only an annotation by default", "format is an assertion (Validation, 7.2.2)"),
    "optional/format/hostname": (
        r'[".]..--',
        "no label of a host name is Punycode, whose validity takes tables of Unicode (Validation, 7.2.2: best effort)",
    ),
    "optional/bignum": (
        "a (?:negative )?bignum is an? (?:integer|number)",
        "numbers without a bound have at most 16 digits before the point (RFC 8259, section 6, allows limits)",
    ),
    "optional/format/duration": ("a component with many digits", "numbers of durations have at most 15 digits"),
    "optional/float-overflow": ("overflow handling", "integers without a bound are within 10**15"),
}
_OF_SPELLING = "optional/zeroTerminatedFloats"  # of draft 4, by which 1.0 is no integer
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')
_MOST = 24  # orders of names, and of what they hold


def spellings(value: Any) -> Iterator[str]:
    """Texts of one document."""
    for same in _same(value):
        text = json.dumps(same, ensure_ascii=False)
        yield text
        yield json.dumps(same)
        yield json.dumps(same, ensure_ascii=False, separators=(",", ":"))
        yield json.dumps(same, ensure_ascii=False, indent=1)
        yield _TEXT.sub(lambda found: _escaped(json.loads(found[0])), text)
        if isinstance(same, dict) and same:
            name, last = list(same.items())[-1]
            yield f"{text[:-1]}, {json.dumps(name, ensure_ascii=False)}: {json.dumps(last, ensure_ascii=False)}}}"


def verdicts(folder: Path, draft: str) -> Iterator[tuple[str, str, str]]:
    """For each test: its file, the outcome, and what it is about."""
    for file in sorted(folder.rglob("*.json")):
        keyword = str(file.relative_to(folder).with_suffix(""))
        for case in json.loads(file.read_text("utf-8")):
            schema = case["schema"]
            try:
                if not isinstance(schema, dict):
                    raise GrammarError("A truth is no schema of a reply.", "Give an object.")
                constraint = follow({"$schema": DRAFTS[draft]} | schema)
            except GrammarError as error:
                yield keyword, "refused", f"{case['description']}: {error.message}"
                continue
            yield keyword, "followed", case["description"]
            for test in case["tests"]:
                texts = [json.dumps(test["data"])] if keyword == _OF_SPELLING else spellings(test["data"])
                taken = any(accepts(constraint, text) for text in texts)
                about = f"{case['description']}: {test['description']}"
                chosen, choice = READINGS.get(keyword, ("(?!)", ""))
                if test["valid"] and re.search(chosen, f"{about}: {json.dumps(test['data'])}"):
                    yield keyword, "accepts" if taken else "reading", f"{about}: {choice}"
                    continue
                yield keyword, "right" if taken == test["valid"] else "accepts" if taken else "rejects", about


def _same(value: Any) -> list[Any]:
    """The value with integral numbers as integers, and with its names in other orders."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e300:
        return [value, int(value)]
    if isinstance(value, list):
        return [list(items) for items in itertools.islice(itertools.product(*map(_same, value)), _MOST)]
    if isinstance(value, dict):
        orders = itertools.islice(itertools.permutations(value), _MOST)
        return [
            dict(zip(names, values, strict=True))
            for names in orders
            for values in itertools.islice(itertools.product(*(_same(value[name]) for name in names)), _MOST)
        ]
    return [value]


def _escaped(text: str) -> str:
    units = text.encode("utf-16-be", "surrogatepass").hex()
    return '"' + "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4)) + '"'


def compiled(folder: Path) -> Counter[str]:
    """How many schemas of jsonschemabench compile, and why the others are refused."""
    found: Counter[str] = Counter()
    for line in (line for file in sorted(folder.glob("*.jsonl")) for line in file.read_text("utf-8").splitlines()):
        try:
            follow(json.loads(line)["schema"])
            found["compiled"] += 1
        except GrammarError as error:
            found[error.message.partition(":")[0]] += 1
    return found


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("draft", choices=DRAFTS, nargs="?", default="draft7")
    options = parser.parse_args()
    if any(options.checkout.glob("*.jsonl")):
        print(*(f"{count:5} {outcome}" for outcome, count in compiled(options.checkout).most_common()), sep="\n")
        return
    table: dict[str, Counter[str]] = {}
    for keyword, outcome, about in verdicts(options.checkout / "tests" / options.draft, options.draft):
        table.setdefault(keyword, Counter())[outcome] += 1
        if outcome in ("accepts", "rejects", "reading", "refused"):
            print(f"{outcome} {keyword}: {about[:300]}")
    columns = ("followed", "refused", "right", "accepts", "rejects", "reading")
    print(f"{'':40}", *(f"{column:>9}" for column in columns))
    for keyword, counts in (*table.items(), ("all", sum(table.values(), Counter()))):
        print(f"{keyword:40}", *(f"{counts[column]:9}" for column in columns))


if __name__ == "__main__":
    _main()
