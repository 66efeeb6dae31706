"""Reading checkpoints: safetensors of every type and damage, tokenizers, and chat templates."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import edgeinfer
from edgeinfer.bundle.gguf_bundle import open_gguf
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.core.errors import CheckpointError
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from edgeinfer.export.source.checkpoint import Checkpoint
from edgeinfer.export.source.hf_config import HFConfig
from edgeinfer.export.source.sidecar import read_sidecar
from edgeinfer.runtime.text.template import ChatTemplate
from edgeinfer.runtime.text.tokenizer import Tokenizer, file_has_pairs
from edgeinfer.tokenizing import chat_template
from tests.cache import made
from tests.edgeinfer.openai.functions import WEATHER, as_tools
from tests.factories import make_checkpoint
from tests.tables import each_row
from tests.tools.random_models import pseudo_text, write_tokenizer


@each_row("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_values_and_row_ranges_agree_with_torch(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"a": torch.randn(7, 5).to(dtype), "b": torch.tensor([1e-7, -3.0, 65504.0]).to(dtype)}
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.names == {"a", "b"}
        for name, tensor in tensors.items():
            checkpoint.require(name, tuple(tensor.shape))
            np.testing.assert_array_equal(checkpoint.read(name), tensor.float().numpy())
        np.testing.assert_array_equal(checkpoint.read("a", 2, 6), tensors["a"][2:6].float().numpy())


def test_shards_are_found_through_the_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "two.safetensors")
    index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.read("a").tolist() == [1, 1]
        assert checkpoint.read("b").tolist() == [0, 0, 0]


def index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@each_row(
    ("weight_map", "says"),
    [
        ({"a": "gone.safetensors"}, "missing"),
        ({"c": "one.safetensors"}, "'c'"),
        ({"a": "../one.safetensors"}, "outside its folder"),
        ({"a": 1}, "weight_map"),
        (None, "weight_map"),
    ],
)
def test_a_wrong_index_is_named(weight_map: Any, says: str, tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=says):
        Checkpoint(tmp_path)


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickle") as caught:
        Checkpoint(tmp_path)
    assert "safe_serialization" in caught.value.hint


def test_an_empty_or_absent_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors"):
        Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="not a directory"):
        Checkpoint(tmp_path / "nowhere")


def test_wrong_names_shapes_and_types_are_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, 3), "i": torch.ones(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        with pytest.raises(CheckpointError, match=r"'b' \(expected shape \(2,\)\)"):
            checkpoint.require("b", (2,))
        with pytest.raises(CheckpointError, match=r"'a' .* shape \(2, 3\), .* \(3, 2\)"):
            checkpoint.require("a", (3, 2))
        with pytest.raises(CheckpointError, match="type I8"):
            checkpoint.require("i", (2,))


def safetensors_bytes(entries: Any, payload: int) -> bytes:
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + bytes(payload)


def entry(shape: Any, start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@each_row(
    ("data", "says"),
    [
        (b"", "truncated"),
        (b"\xff" * 40, "truncated"),
        (safetensors_bytes({"a": entry([2], 0, 8)}, 8)[:-1], "truncated"),
        (safetensors_bytes({"a": entry([2], 0, 8)}, 9), "does not describe"),
        (safetensors_bytes({"a": entry([3], 0, 8)}, 8), "need 12"),
        (safetensors_bytes({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, 12), "overlap"),
        (safetensors_bytes({"a": entry([2], 8, 16)}, 16), "gaps"),
        (safetensors_bytes({"a": entry([2], 0, 8, "F99")}, 8), "malformed"),
        (safetensors_bytes({"a": entry([-2], 0, 8)}, 8), "malformed"),
        (safetensors_bytes({"a": 7}, 0), "malformed"),
        (safetensors_bytes([1], 0), "not a JSON object"),
        (struct.pack("<Q", 3) + b"{{{", "not valid JSON"),
    ],
)
def test_damaged_files_are_named(data: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=says) as caught:
        Checkpoint(tmp_path)
    assert "model.safetensors" in caught.value.message


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 150), value=st.integers(0, 255))
def test_any_changed_byte_is_read_or_refused(
    position: int, value: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = bytearray(safetensors_bytes({"a": entry([2], 0, 8), "b": entry([2, 2], 8, 24)}, 24))
    data[position % len(data)] = value
    folder = tmp_path_factory.getbasetemp() / "mutated"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(bytes(data))
    try:
        with Checkpoint(folder) as checkpoint:
            for name in checkpoint.names:
                assert name
    except CheckpointError as error:
        assert error.message


def test_a_file_cut_after_opening_is_noticed(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1000)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        with (tmp_path / "model.safetensors").open("r+b") as file:
            file.truncate(500)
        with pytest.raises(CheckpointError, match="ended before"):
            checkpoint.read("a")


CONFIG = HFConfig({"bos_token_id": 1, "eos_token_id": 2})


def written(folder: Path) -> bytes:
    return read_sidecar(folder, CONFIG).files["tokenizer.json"]


def change(folder: Path, **model: Any) -> bytes:
    """Sets fields of the tokenizer's model; gives the file as it then is."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    tokenizer["model"] |= model
    path.write_text(json.dumps(tokenizer), "utf-8")
    return path.read_bytes()


def test_pairs_become_texts_and_the_tokenizer_stays_the_same(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", 3000)
    (tmp_path / "lean.json").write_bytes(written(tmp_path))
    assert file_has_pairs(tmp_path / "tokenizer.json")
    assert not file_has_pairs(tmp_path / "lean.json")
    theirs, ours = (Tokenizer.from_file(tmp_path / name) for name in ("tokenizer.json", "lean.json"))
    for text in (pseudo_text(500), "Grüße, 世界!  \n\t <|im_end|> don't", ""):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids and ours.decode(ids) == theirs.decode(ids)
    before, after = (json.loads((tmp_path / name).read_text("utf-8")) for name in ("tokenizer.json", "lean.json"))
    assert [" ".join(pair) for pair in before["model"].pop("merges")] == after["model"].pop("merges")
    assert before == after


@each_row("merges", [[], ["a b"], [["a", " b"]], [["a", "b", "c"]], [["a", 1]], None])
def test_what_cannot_be_texts_stays_as_it_is(tmp_path: Path, merges: Any) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", 300)
    data = change(tmp_path, merges=merges)
    assert written(tmp_path) == data


def test_half_of_a_surrogate_pair_stays_as_it_was_written(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", 300)
    data = change(tmp_path, unk_token="\ud800")
    assert written(tmp_path) == data


def test_what_only_the_settings_say_of_a_tokenizer(tmp_path: Path) -> None:
    """As transformers reads them: classes that compose text, and added tokens, whose flags may differ."""
    write_tokenizer(tmp_path / "tokenizer.json", 300)
    original = (tmp_path / "tokenizer.json").read_bytes()
    size = 1 + max(each["id"] for each in json.loads(original)["added_tokens"])
    flags = {"single_word": False, "lstrip": False, "rstrip": True, "normalized": False, "special": True}
    known = {"content": "<|im_end|>"} | flags
    (end,) = [each["id"] for each in json.loads(original)["added_tokens"] if each["content"] == "<|im_end|>"]
    for name, added in (("Qwen2TokenizerFast", {}), ("Other", {str(end): known, "9000": {"content": "<new>"} | flags})):
        settings = {"tokenizer_class": name, "added_tokens_decoder": added}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
        (tmp_path / "made.json").write_bytes(written(tmp_path))
        made = Tokenizer.from_file(tmp_path / "made.json")
        if added:
            ids = made.encode("<|im_end|>  a<new>", add_special_tokens=False)
            assert ids[0] == end and made.decode(ids, skip_special_tokens=False) == "<|im_end|>a<new>"
            assert made.token_to_id("<new>") in made.special_ids and made.token_to_id("<new>") not in range(size)
        else:
            assert made.encode("cafe\u0301") == made.encode("caf\u00e9")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}', "utf-8")
    normalized = json.loads(original) | {"normalizer": {"type": "NFKC"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(normalized), "utf-8")
    assert json.loads(written(tmp_path))["normalizer"] == {"type": "NFKC"}


DEFAULT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TOOL_USE = "tools: {% for t in tools %}{{ t | tojson }} <tool_call>{% endfor %}\n" + DEFAULT
NAMED = {"default": DEFAULT, "tool_use": TOOL_USE, "rag": "{{ documents }}"}
LISTED = [{"name": name, "template": text} for name, text in NAMED.items()]
FILES = ("chat_template.jinja", "chat_template.tool_use.jinja")
USER = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, Any] = {"messages": USER, "tools": as_tools(WEATHER)}


def make_named(folder: Path) -> None:
    make_checkpoint(folder / "checkpoint", "llama-tied", chat_template=LISTED, max_position_embeddings=2048)  # type: ignore[arg-type]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return made(make_named, copy_to=tmp_path / "made") / "checkpoint"


MORE = "additional_chat_templates"
WAYS: list[tuple[dict[str, Any], dict[str, str], tuple[str | None, str | None]]] = [
    ({"chat_template": LISTED}, {}, (DEFAULT, TOOL_USE)),
    ({"chat_template": NAMED}, {}, (DEFAULT, TOOL_USE)),
    ({}, {"chat_template.jinja": DEFAULT, f"{MORE}/tool_use.jinja": TOOL_USE}, (DEFAULT, TOOL_USE)),
    ({"chat_template": "old"}, {"chat_template.jinja": DEFAULT, f"{MORE}/rag.jinja": "x"}, (DEFAULT, None)),
    ({"chat_template": LISTED}, {"chat_template.jinja": "new"}, ("new", TOOL_USE)),
    ({"chat_template": LISTED[1:]}, {}, (TOOL_USE, None)),
    ({"chat_template": LISTED[:1]}, {}, (DEFAULT, None)),
    ({}, {"chat_template.json": json.dumps({"chat_template": DEFAULT})}, (DEFAULT, None)),
    ({}, {"chat_template.json": json.dumps({"chat_template": NAMED})}, (DEFAULT, TOOL_USE)),
    ({"chat_template": [5, {"name": "default"}, {"template": "x"}]}, {}, (None, None)),
    ({"chat_template": None}, {}, (None, None)),
]


@each_row(("settings", "files", "found"), WAYS)
def test_every_way_in_which_templates_are_published(
    checkpoint: Path, settings: dict[str, Any], files: dict[str, str], found: tuple[str | None, str | None]
) -> None:
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    (checkpoint / MORE).mkdir(exist_ok=True)
    for old in (checkpoint / "chat_template.jinja", checkpoint / "chat_template.json", *(checkpoint / MORE).iterdir()):
        old.unlink(missing_ok=True)
    for name, text in files.items():
        (checkpoint / name).write_text(text, "utf-8")
    written = read_sidecar(checkpoint, HFConfig({})).files
    texts = tuple(written[name].decode() if name in written else None for name in FILES)
    assert texts == found


@pytest.mark.parametrize("format", ["onnx", "gguf"])
def test_conversations_with_tools_take_the_template_for_tools(checkpoint: Path, tmp_path: Path, format: str) -> None:
    if format == "gguf":
        pytest.importorskip("gguf")
        out = export_checkpoint(checkpoint, tmp_path / "out", ExportConfig(format="gguf", gguf_type="F16"))
        template = chat_template(open_gguf(out / "model.gguf"))
    else:
        out = export_checkpoint(
            checkpoint, tmp_path / "out", ExportConfig(bits=4, keep_small=False, calibration="none")
        )
        template = chat_template(open_bundle(out))
    check(template)


def check(template: ChatTemplate | None) -> None:
    assert template is not None and template.tool_use is not None
    assert template.render(USER) == template.render(USER, tools=[]) == "user: Hi\n"
    told = template.render(USER, tools=ASKED["tools"])
    assert told.startswith("tools: ") and "get_weather" in told and told.endswith("user: Hi\n")
    template.close()


def test_requests_with_tools_take_the_template_for_tools(checkpoint: Path, tmp_path: Path) -> None:
    out = export_checkpoint(checkpoint, tmp_path / "out", ExportConfig(bits=4, keep_small=False, calibration="none"))
    with edgeinfer.load(out, threads=1, speculation="off") as model:
        assert (model.chat_template_text, model.tool_template_text) == (DEFAULT, TOOL_USE)
        with_tools = model.render_chat(**ASKED)
        assert with_tools.startswith("tools: ") and "get_weather" in with_tools
        assert model.render_chat(USER) == "user: Hi\n"
        for asked, tokens in ((ASKED, model.tokenize_chat(**ASKED)), ({"messages": USER}, model.tokenize_chat(USER))):
            answer = model.create_chat_completion(**asked, max_tokens=1)
            assert isinstance(answer, dict) and answer["usage"]["prompt_tokens"] == len(tokens)
