"""Draft modules together with adapters: a target with one is drafted for, and the text is that of plain decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.bundle.array_file import encode_arrays
from edgeinfer.bundle.opening import open_bundle
from tests.cache import made
from tests.edgeinfer.test_eagle import make_bundle as make_eagle
from tests.edgeinfer.test_mtp import make_bundle as make_mtp
from tests.kernel import require_kernel
from tests.speculation import load_eager

pytestmark = pytest.mark.slow
RANK = 4
PROMPT = [5 + i % 7 for i in range(60)]


def adapt_everything(folder: Path, bundle: Path, seed: int) -> str:
    """An adapter of all modules that a bundle's matrices are made of, with random factors."""
    folder.mkdir()
    draw, arrays = np.random.default_rng(seed), {}
    for entry in open_bundle(bundle).manifest.tensors:
        for module in entry.modules:
            name = f"base_model.model.{module.name}.lora_"
            arrays[f"{name}A.weight"] = draw.normal(0, 0.1, (RANK, entry.shape[1])).astype(np.float32)
            arrays[f"{name}B.weight"] = draw.normal(0, 0.1, (module.outputs, RANK)).astype(np.float32)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(encode_arrays(arrays, {}))
    return str(folder)


@pytest.mark.parametrize("drafter", ["eagle", "mtp"])
@pytest.mark.parametrize("width", [1, 3])
def test_modules_draft_for_each_adapter(drafter: str, width: int, tmp_path: Path) -> None:
    require_kernel()
    folder = made(make_eagle, "eagle3", 8) if drafter == "eagle" else made(make_mtp, "Qwen3_5", 8)
    bundle = folder / "bundle"
    adapters = {name: adapt_everything(tmp_path / name, bundle, seed) for seed, name in enumerate(("a", "b"))}
    found, drafts = set(), dict[str | None, int]()
    # Kept prefixes are of the adapter that made them.
    with load_eager(bundle, context=256, adapters=adapters, prefix_cache="20MB", remember=False) as model:
        for adapter in ("a", None, "b", "b", "a"):
            options: dict[str, Any] = {"max_tokens": 24, "adapter": adapter, "ignore_eos": True, "temperature": 0}
            # What random modules taught would keep them from drafting at all.
            edgeinfer.tools.restore_drafting(model, {})
            drafted = model.generate(PROMPT, speculation=drafter, draft_width=width, **options)
            plain = model.generate(PROMPT, speculation="off", **options)
            assert drafted.token_ids == plain.token_ids
            drafts[adapter] = drafts.get(adapter, 0) + drafted.speculation.drafted
            found.add(plain.token_ids)
    assert len(found) == 3
    assert all(drafts.values()), drafts
