"""What the tests of all draft modules share: prompts, ways to draft, their readings, checkpoints that do not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

import edgeinfer
from edgeinfer.core.errors import CheckpointError
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.decoding.sequence import run_alone
from edgeinfer.runtime.speculation.drafters.contract import DraftContext
from edgeinfer.runtime.speculation.drafters.module_drafter import ModuleDrafter
from tests.factories import make_checkpoint
from tests.speculation import load_eager, same

PROMPT = [5 + i % 7 for i in range(90)]
WAYS: dict[str, dict[str, Any]] = {
    "chain": {},
    "tree": {"draft_width": 3},
    "sampled": {"temperature": 1.0, "seed": 11},
    "sampled tree": {"temperature": 1.0, "seed": 11, "draft_width": 3},
}
# What is done to a checkpoint's folder, and what the message of its refusal matches.
Damage = tuple[Callable[[Path], None], str]


def export_with_module(
    folder: Path, family: str, bits: int, make: Callable[[Path, Path], Path], **settings: Any
) -> None:
    """Makes a target of six layers, with `settings` in its config.json, a module for it, which `make` writes into its
    first folder, and the bundle of both, in `target`, `drafter` and `bundle`."""
    sizes: dict[str, Any] = {"num_hidden_layers": 6, "max_position_embeddings": 512}
    make_checkpoint(folder / "target", family, seed=1, **sizes | settings)
    module = make(folder / "drafter", folder / "target")
    export_checkpoint(
        folder / "target",
        folder / "bundle",
        ExportConfig(bits=bits, drafter=module, keep_small=False, calibration="none"),
    )


def drafter_of(model: edgeinfer.Model, name: str) -> ModuleDrafter:
    """The drafter with a module of a loaded model."""
    drafter = model._parts.speculator._drafter(name)
    assert isinstance(drafter, ModuleDrafter)
    return drafter


def drafted_logits(drafter: ModuleDrafter, text: Sequence[int], path: Sequence[int]) -> NDArray[Any] | None:  # (V,)
    """Its inputs after a path behind a text that it has started; None if that is too long."""
    context = DraftContext([*text], lambda logits, drafted: (int(logits.argmax()), None), lambda drafted: ())
    logits = run_alone(drafter._logits(context, path))
    return None if logits is None else logits.copy()


def read_texts(
    bundle: Path, name: str, **options: Any
) -> Iterator[tuple[ModuleDrafter, list[int]]]:  # of a loaded model, valid until the next
    """The drafter behind a prompt and a reply of many rounds, of chains and of trees, and both as one text; `options`
    are of the replies."""
    who = f"copy,recycle,{name}"
    for width in (1, 3):
        with load_eager(bundle, context=256, speculation=who, remember=False) as model:
            reply = model.generate(
                PROMPT, speculation=who, max_tokens=40, ignore_eos=True, draft_width=width, **options
            )
            assert reply.speculation.per_drafter[name].drafted > 0 < reply.speculation.accepted
            text, drafter = [*PROMPT, *reply.token_ids], drafter_of(model, name)
            drafter.begin(text)
            yield drafter, text


def require_logits(drafter: ModuleDrafter, text: Sequence[int], path: Sequence[int], expected: NDArray[Any]) -> None:
    """Requires that it drafts with these logits, (V,), of which those that are not finite are impossible."""
    found, possible = drafted_logits(drafter, text, path), np.isfinite(expected)
    assert found is not None
    np.testing.assert_array_equal(np.isfinite(found), possible)
    np.testing.assert_allclose(found[possible], expected[possible], atol=1e-4)


def require_same_near_the_end(bundle: Path, name: str, lengths: Sequence[int]) -> None:
    """Requires plain decoding's text behind prompts that nearly fill a context of 24."""
    with load_eager(bundle, context=24, remember=False) as model:
        for length in lengths:
            same(model, name, prompt=PROMPT[:length], ignore_eos=True)


def require_other_verifications(model: edgeinfer.Model, name: str) -> None:
    """Requires replies by verifications that give other text than plain decoding."""
    options: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 12, "ignore_eos": True}
    result = model.generate(PROMPT[:9], speculation=name, verification="rejection", **options)
    assert len(result.token_ids) == 12


def require_planned(bundle: Path, name: str) -> None:
    """Requires that memory is planned for the module where it drafts."""
    with_one, without = (edgeinfer.plan(bundle, context=256, speculation=who) for who in (name, "off"))
    assert with_one.terms["draft_model"] > 0 and "draft_model" not in without.terms


def change_config(nested: str = "", **fields: Any) -> Callable[[Path], None]:
    """Gives fields of config.json, or of its field `nested`, other values."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config |= {nested: config[nested] | fields} if nested else fields
        (folder / "config.json").write_text(json.dumps(config))

    return change


def change_tensors(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Edits the tensors of a checkpoint."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return change


def require_refused(target: Path, module: Path, damages: Mapping[str, Damage], scratch: Path) -> None:
    """Requires that every damaged copy of a module is refused in one line, before anything is written."""
    for name, (change, message) in damages.items():
        damaged = Path(shutil.copytree(module, scratch / name))
        change(damaged)
        with pytest.raises(CheckpointError, match=message) as refused:
            export_checkpoint(target, scratch / "bundle", ExportConfig(4, calibration="none", drafter=damaged))
        assert "\n" not in refused.value.message and refused.value.hint
        assert not (scratch / "bundle").exists()
