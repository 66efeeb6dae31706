"""What is not run as pages have it: commands in a smaller size, and those that cannot be run here, each with why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """An exception."""

    pattern: str  # how a command begins, or what is replaced in it
    reason: str  # why
    instead: str = ""  # what takes its place


_SMALL = "trains or measures for minutes; a few steps show that the command is right"
_CALIBRATED = "takes most of the time; the page calibrates once, tests/edgeinfer/test_name_to_chat.py by itself"
_LONG = "trains for half a minute even at its smallest; tests/export run it"
# Replaced wherever they are, in this order.
INSTEAD = (
    Rule(" -m smollm2-135m", "fetches 98 MB; tests/edgeinfer/test_gguf_sources.py fetches less", " -m qwen2.5-0.5b"),
    Rule(" --steps 500", _SMALL, " --steps 2 --rows 2 --length 32"),
    Rule(" --kind medusa", _SMALL, " --kind medusa --steps 2 --rows 2 --length 32"),
    Rule(" --keep 0.75", _SMALL, " --keep 0.75 --steps 2 --rows 2"),
    Rule("--calibration texts.txt", _SMALL, "--calibration texts.txt --calibration-tokens 512"),
    Rule(" CHECKPOINT my-model --bits 4", _CALIBRATED, " CHECKPOINT my-model --bits 4 --no-calibration"),
    Rule(" -m CHECKPOINT --bits 8", _CALIBRATED, " -m CHECKPOINT --bits 8 --no-calibration"),
    Rule(" --group-size 32", _CALIBRATED, " --group-size 32 --no-calibration"),
    Rule("edgeinfer tune --skip", _SMALL, "edgeinfer tune --skip --evaluations 2"),
    Rule("edgeinfer bench devices", _SMALL, "edgeinfer bench devices --devices cpu:onnxruntime -r 1"),
    Rule(" --quick", _SMALL, " --quick --evaluations 2 -t 1 --prefill-chunk 64 --weights mapped"),
)
NOT_RUN = (
    Rule("python3 -m venv", "tests run in an environment already; .ci/run makes one by this line"),
    Rule("source ", "tests run in an environment already"),
    Rule("pytest", "runs these tests"),
    Rule("python .ci/wheels.py", "compiles for eight systems for minutes; tests/test_wheels.py runs it"),
    Rule("python -m tests.tools.reproduce", "measures for an hour, or writes into the checkout"),
    Rule("python -m tests.tools.dialogues STORIES", "needs the training data of the built-in model"),
    Rule("edgeinfer distill drafter my-model my-drafter --text dialogues.jsonl", "trains for half an hour"),
    *(
        Rule(f"edgeinfer distill {kind}", _LONG)
        for kind in ("drafter my-model my-drafter --text texts.jsonl", "eagle", "dflash", "hydra-plus", "sorted")
    ),
    Rule("edgeinfer run -m my-model --device openvino:NPU", "needs a neural processor"),
)
# Models of the hub that pages begin with, converted before without calibration: the first use is tried in
# tests/edgeinfer/test_name_to_chat.py.
PULLED = dict.fromkeys(("README.md", "docs/index.md", "docs/guide/start.md"), "qwen2.5-0.5b")
PULLED["docs/guide/models.md"] = "Qwen/Qwen2.5-0.5B-Instruct"
# What pages presume that a reader has, by the page's path: names that `tests.docs.test_commands` lays out.
HAS = {
    "README.md": ("model.gguf",),
    "docs/guide/devices.md": ("my-model", "CHECKPOINT"),
    "docs/guide/drafters.md": ("my-model", "my-drafter", "my-model-with-drafter", "CHECKPOINT", "texts.jsonl"),
    "docs/guide/gguf.md": ("CHECKPOINT", "model.gguf", "texts.txt"),
    "docs/guide/memory.md": ("my-model",),
    "docs/guide/models.md": ("CHECKPOINT", "PATH", "texts.txt", "others.txt"),
    "docs/guide/server.md": ("key.txt",),
    "docs/guide/tuning.md": ("my-model",),
}
