"""Replies with adapters: chosen per request, alone or side by side, the same tokens whatever drafts, and never from
rows that another adapter made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.bundle.array_file import encode_arrays
from edgeinfer.core.errors import UsageError
from tests.cli import edgeinfer as command
from tests.kernel import require_kernel

PROMPT = "Once upon a time there was a dog who"
# Of the built-in model: outputs and inputs.
SHAPES = {"self_attn.q_proj": (256, 256), "mlp.up_proj": (640, 256), "mlp.down_proj": (256, 640)}


def write_adapter(folder: Path, seed: int, rank: int) -> Path:
    """An adapter of the built-in model in PEFT's layout, with random factors."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(SHAPES)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    draw, arrays = np.random.default_rng(seed), {}
    for layer in range(6):
        for module, (outputs, inputs) in SHAPES.items():
            name = f"base_model.model.model.layers.{layer}.{module}.lora_"
            arrays[f"{name}A.weight"] = draw.normal(0, 0.05, (rank, inputs)).astype(np.float32)
            arrays[f"{name}B.weight"] = draw.normal(0, 0.05, (outputs, rank)).astype(np.float32)
    (folder / "adapter_model.safetensors").write_bytes(encode_arrays(arrays, {}))
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    require_kernel()
    folder = tmp_path_factory.mktemp("adapters")
    return {"wild": write_adapter(folder / "wild", 1, 16), "odd": write_adapter(folder / "odd", 2, 5)}


@pytest.fixture(scope="module")
def model(adapters: dict[str, Path]) -> Iterator[edgeinfer.Model]:
    with edgeinfer.load(adapters=adapters, context=256, prefix_cache="20MB") as model:
        yield model


def ids(model: edgeinfer.Model, adapter: str | None, **options: object) -> tuple[int, ...]:
    return model.generate(PROMPT, max_tokens=24, adapter=adapter, **options).token_ids  # type: ignore[arg-type]


def test_replies_are_those_of_their_adapter(model: edgeinfer.Model, tmp_path: Path) -> None:
    alone: dict[str | None, tuple[int, ...]] = {}
    names: list[str | None] = ["wild", None, "odd"]
    for name in names:
        model.unload()
        alone[name] = ids(model, name, speculation="off")
    assert len(set(alone.values())) == 3
    # Taking turns over what the cache holds and keeps of other texts, drafted and not.
    for name in ("odd", "wild", None, "wild", "odd", None):
        assert ids(model, name) == alone[name]
        assert ids(model, name, speculation="exit,bits,copy", draft_max=4) == alone[name]
    # Rows of a session file go on with the adapter that made them.
    ids(model, "wild")
    model.save_session(tmp_path / "wild.session")
    assert ids(model, None) == alone[None]
    model.load_session(tmp_path / "wild.session")
    assert ids(model, None) == alone[None]
    model.load_session(tmp_path / "wild.session")
    again = model.generate(PROMPT, max_tokens=24, adapter="wild")
    assert again.token_ids == alone["wild"] and again.timings.cached_prompt_tokens
    assert model.plan.terms["adapters"] == 6 * 4 * 21 * (256 + 256 + 640 + 256 + 256 + 640)


def test_adapters_share_passes(model: edgeinfer.Model) -> None:
    alone = {name: ids(model, name) for name in ("wild", None, "odd")}
    order = ["odd", None, "wild", "wild", "odd", None]
    with closing(model.reply_batch(4)) as batch:
        given: dict[str, Any] = {"max_tokens": 24}
        found = batch.run([partial(model.stream, PROMPT, adapter=name, **given) for name in order])
    assert [reply.token_ids for reply in found] == [alone[name] for name in order]


def test_adapters_that_are_not_there_are_refused(model: edgeinfer.Model, adapters: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="no adapter 'mild'") as caught:
        ids(model, "mild")
    assert "wild, odd" in caught.value.hint
    with edgeinfer.load(context=128) as plain, pytest.raises(UsageError, match="no adapter 'wild'"):
        ids(plain, "wild")
    with pytest.raises(UsageError, match="without the native kernel"):
        edgeinfer.load(adapters=adapters, native=False)
    with pytest.raises(UsageError, match="takes no adapters"):
        edgeinfer.load(adapters=adapters, backend="reference")


def test_the_command_has_adapters(model: edgeinfer.Model, adapters: dict[str, Path]) -> None:
    given = [part for name, path in adapters.items() for part in ("--lora", f"{name}={path}")]
    ran = command("run", "--raw", "-p", PROMPT, "-n", "24", "-c", "256", "--adapter", "odd", "--json", *given)
    assert tuple(json.loads(ran.stdout)["token_ids"]) == ids(model, "odd")
    assert command("run", "-p", PROMPT, "--lora", "odd").returncode == 2
