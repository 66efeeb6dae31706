"""Models on this machine and in the catalog: names, offers, sizes, what they say before loading, what is removed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import edgeinfer
from edgeinfer import hub
from edgeinfer.bundle.manifest import Manifest
from edgeinfer.bundle.names import display_name, file_name, quantization_of
from edgeinfer.bundle.writing import seal
from edgeinfer.core.errors import BudgetError, HubError, ModelError, UsageError
from edgeinfer.core.options.load import CONVERTED_BITS
from edgeinfer.export.architectures import ARCHITECTURES
from edgeinfer.hub.catalog_models import CONVERTED, DecoderSizes
from edgeinfer.hub.conversion import FetchJob
from edgeinfer.hub.download import Repository, best_offer, offers_in
from edgeinfer.hub.folder import ModelSource, find_converted
from edgeinfer.hub.ids import AUTO, HubName, gguf_parts, parse_name
from edgeinfer.hub.resolving import name_of
from edgeinfer.installed import list_models, remove_model
from edgeinfer.openai import make_completion
from tests.gguf_builder import FLOAT32, INT32, small_model
from tests.speculation import BUILTIN, needs_builtin
from tests.tables import each_row

# Names of files, folders and repositories, and how people say them.
SHOWN = {
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf": "Qwen2.5 Coder 0.5B Instruct",
    "qwen2.5-coder-0.5b-instruct-q4_k_m:8bit": "Qwen2.5 Coder 0.5B Instruct",
    "smollm2-135m-instruct-q4_1": "SmolLM2 135M Instruct",
    "gemma3-270m-q4_k_m": "Gemma 3 270M",
    "gemma-3-270m-it-Q8_0.gguf": "Gemma 3 270M IT",
    "Qwen/Qwen3-0.6B": "Qwen3 0.6B",
    "Qwen/Qwen3-0.6B:4bit": "Qwen3 0.6B",
    "unsloth/Qwen3-30B-A3B-Instruct-2507-GGUF:UD-Q4_K_XL": "Qwen3 30B A3B Instruct 2507",
    "llama-3.2-1b-instruct.Q4_K_M.gguf": "Llama 3.2 1B Instruct",
    "Meta-Llama-3.1-8B-Instruct-Q4_0-00001-of-00002.gguf": "Meta Llama 3.1 8B Instruct",
    "mixtral-8x7b-instruct-v0.1.Q4_0.gguf": "Mixtral 8x7B Instruct v0.1",
    "gpt-oss-20b-mxfp4.gguf": "GPT OSS 20B",
    "tinyllama-1.1b-chat-v1.0": "TinyLlama 1.1B Chat v1.0",
    "deepseek-r1-distill-qwen-1.5b": "DeepSeek R1 Distill Qwen 1.5B",
    "C:\\models\\phi-4-mini-instruct-IQ4_XS.gguf": "Phi 4 Mini Instruct",
    "smollm2:135m": "SmolLM2 135M",
    # Users' own names stay.
    "tales": "tales",
    "qc15": "qc15",
    "my-bundle": "my-bundle",
}


class Machine:
    """A hub's cache and a folder of models, of which what is removed is noted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.removed: list[str] = []
        self.cached = [
            self.file("org/chat", "checkpoint", 5),
            self.file("org/other", "checkpoint", 7),
            self.file("org/files:Q4_0", "gguf", 11),
            self.file("org/files:Q8_0", "gguf", 13),
            self.file("org/bundle", "bundle", 17),
        ]
        self.converted = [
            *(self.conversion(ModelSource("org/chat"), bits) for bits in (4, 8)),
            self.conversion(ModelSource("org/one"), 4),
            *(self.conversion(ModelSource(str(folder / "Small-1B"), "directory"), bits) for bits in (4, 8)),
            self.conversion(ModelSource(str(folder / "qc15"), "directory"), 4),
        ]

    def file(self, name: str, kind: Any, size: int) -> hub.CachedModel:
        path = self.folder / name.replace("/", "-")
        path.write_bytes(bytes(size))
        return hub.CachedModel(name, name.partition(":")[0], kind, path, (path,))

    def conversion(self, source: ModelSource, bits: int) -> hub.Converted:
        path = source.place(bits, "main")
        source.record()
        path.mkdir()
        (path / "edgeinfer.json").touch()
        return hub.Converted(source, bits, "main", path)

    def remove_cached(self, model: hub.CachedModel) -> int:
        self.removed.append(model.name)
        return model.bytes

    def remove_converted(self, model: hub.Converted) -> int:
        self.removed.append(f"{model.source.name.rpartition('/')[2]}-{model.bits}")
        return 100


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    made = Machine(tmp_path)
    for name in ("mine", "twice", "folder/twice"):
        (hub.models_folder() / name).mkdir(parents=True)
        (hub.models_folder() / name / "edgeinfer.json").touch()
    for name in ("qwen2.5-coder-0.5b-instruct-q4_k_m", "big-70b-00001-of-00002", "big-70b-00002-of-00002"):
        (hub.models_folder() / f"{name}.gguf").touch()
    for name in ("gemma3-270m-q4_k_m", "gone-1b"):
        hub.note_use(tmp_path / f"{name}.gguf")
    (tmp_path / "gemma3-270m-q4_k_m.gguf").touch()
    for module in ("hub", "hub.placing", "hub.resolving"):
        monkeypatch.setattr(f"edgeinfer.{module}.cached_models", lambda: made.cached)
    monkeypatch.setattr("edgeinfer.hub.remove_cached", made.remove_cached)
    monkeypatch.setattr("edgeinfer.hub.remove_converted", made.remove_converted)
    monkeypatch.setattr(
        "edgeinfer.hub.catalog_model", lambda name: SimpleNamespace(repo="org/one") if name == "one" else None
    )
    return made


def test_what_goes_is_what_is_named(machine: Machine) -> None:
    for name, freed, removed in (
        ("org/chat", 205, ["chat-4", "chat-8", "org/chat"]),
        ("org/chat:4bit", 100, ["chat-4"]),
        ("org/one", 100, ["one-4"]),
        ("one", 100, ["one-4"]),
        ("org/other", 7, ["org/other"]),
        ("org/files:Q8_0", 13, ["org/files:Q8_0"]),
        ("org/bundle", 17, ["org/bundle"]),
        (str(machine.converted[1].path), 100, ["chat-8"]),
        ("Small-1b:8bit", 100, ["Small-1B-8"]),
        ("Small-1B", 200, ["Small-1B-4", "Small-1B-8"]),
        ("qc15", 100, ["qc15-4"]),
    ):
        machine.removed.clear()
        assert (remove_model(name), machine.removed) == (freed, removed), name
    machine.removed.clear()
    with pytest.raises(ModelError, match="no model org/none"):
        remove_model("org/none")
    for kept in (hub.BUILTIN, "mine", str(hub.models_folder() / "mine")):
        with pytest.raises(UsageError, match=r"stays|not removed"):
            remove_model(kept)
    assert machine.removed == []


def test_each_is_listed_once_and_with_its_origin(machine: Machine) -> None:
    folder = hub.models_folder()
    found = {model.name: (model.origin, model.format, model.hub_id, model.source_bytes) for model in list_models()}
    assert found == {
        hub.BUILTIN: ("built-in", "bundle", None, 0),
        "mine": ("folder", "bundle", None, 0),
        str(folder / "twice"): ("folder", "bundle", None, 0),
        str(folder / "folder" / "twice"): ("folder", "bundle", None, 0),
        "qwen2.5-coder-0.5b-instruct-q4_k_m": ("folder", "gguf", None, 0),
        "big-70b": ("folder", "gguf", None, 0),
        "Small-1B:4bit": ("converted", "bundle", None, 0),
        "Small-1B:8bit": ("converted", "bundle", None, 0),
        "qc15": ("converted", "bundle", None, 0),
        "org/bundle": ("hub", "gguf", "org/bundle", 0),
        "org/chat:4bit": ("converted", "bundle", "org/chat", 5),
        "org/chat:8bit": ("converted", "bundle", "org/chat", 5),
        "org/files:Q4_0": ("hub", "gguf", "org/files", 0),
        "org/files:Q8_0": ("hub", "gguf", "org/files", 0),
        "org/one": ("converted", "bundle", "org/one", 0),
    }
    assert next(model.name for model in list_models()) == hub.BUILTIN
    assert all(model.error for model in list_models() if model.name != hub.BUILTIN)


def test_short_names_load_what_is_listed_under_them(machine: Machine) -> None:
    folder = hub.models_folder()
    small, one = machine.converted[3:5], machine.converted[2]
    os.utime(small[1].path, (1, 1))
    for model in list_models():
        if model.origin != "hub":
            assert hub.find_model(model.name).here == model.path, model.name
    for name, path in (
        ("QWEN2.5-Coder-0.5B-instruct-q4_k_m", folder / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),
        ("Small-1B", small[0].path),  # of several conversions the last
        ("small-1b:8bit", small[1].path),
        ("one", one.path),
        ("org-files:Q8_0", machine.folder / "org-files:Q8_0"),
        # What was loaded from elsewhere before.
        ("gemma3-270m-q4_k_m", machine.folder / "gemma3-270m-q4_k_m.gguf"),
    ):
        assert hub.find_model(name).here == path, name
    assert hub.resolve("Small-1B", bits=8) == small[1].path
    with pytest.raises(UsageError, match="GGUF file, whose weights have their bits"):
        hub.resolve("gemma3-270m-q4_k_m", bits=8)
    with pytest.raises(ModelError, match="Several models are called twice") as several:
        hub.find_model("twice")
    assert str(folder / "folder" / "twice") in several.value.hint
    for name in ("gone-1b", "none"):
        with pytest.raises(ModelError, match="No model at"):
            hub.find_model(name)


def test_models_are_shown_by_the_names_that_people_know(machine: Machine) -> None:
    for name, shown in SHOWN.items():
        assert display_name(name) == shown, name
    for path, shown in {
        None: "tales",
        machine.converted[3].path: "Small 1B",
        # Conversations name models that are gone.
        hub.models_folder() / "Qwen--Qwen3-0.6B" / "4-bit-c1899de289a0": "Qwen3 0.6B",
        hub.models_folder() / "_qwen2.5-coder-0.5b-instruct-q4_k_m-2bfb703c" / "4-bit-e4be2a5d27b5": (
            "Qwen2.5 Coder 0.5B Instruct"
        ),
        hub.models_folder() / "folder" / "twice": "twice",
        "Qwen/Qwen3-0.6B": "Qwen3 0.6B",
        hub.models_folder() / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf": "Qwen2.5 Coder 0.5B Instruct",
    }.items():
        assert hub.shown_name(path) == shown


def test_a_file_that_says_nothing_is_called_by_its_metadata_or_its_folder() -> None:
    folder = Path("/models/Qwen3-0.6B-GGUF")
    for name in ("model.gguf", "ggml-model-q4_0.gguf", "Q4_K_M.gguf", "sha256-" + "0f" * 32):
        assert (file_name(folder / name, "Qwen3"), file_name(folder / name)) == ("Qwen3", folder.name), name
    assert file_name(folder / "qwen3-0.6b-q8_0-00001-of-00002.gguf", "Qwen3 AWQ") == "qwen3-0.6b-q8_0"


def test_conversions_of_all_bits_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    source = ModelSource("org/model")
    source.record()
    for bits in (*CONVERTED_BITS, AUTO):
        source.place(bits, "abc").mkdir()
        (source.place(bits, "abc") / "edgeinfer.json").touch()
    assert [converted.bits for converted in hub.converted_models()] == [AUTO, *CONVERTED_BITS]
    assert {place.name for place in hub.places()} >= {"org/model:auto", "org/model:4bit"}
    found = find_converted(source, 3)
    assert found is not None and found.path == source.place(3, "abc")


def test_a_short_name_in_other_bits_means_the_same_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    source, jobs = ModelSource("org/model"), list[FetchJob]()
    source.record()
    source.place(4, "abc").mkdir()
    (source.place(4, "abc") / "edgeinfer.json").touch()
    for module in ("placing", "resolving"):
        monkeypatch.setattr(f"edgeinfer.hub.{module}.cached_models", lambda: [])

    def fetch(job: FetchJob, *_: object) -> Path:
        jobs.append(job)
        return source.place(8, "abc")

    monkeypatch.setattr("edgeinfer.hub.resolving.fetch", fetch)
    assert hub.resolve("model") == hub.resolve("model", bits=4) == source.place(4, "abc")
    assert hub.resolve("model", bits=8) == source.place(8, "abc")
    assert [(job.name, job.bits) for job in jobs] == [("org/model", 8)]


LICENCES = {"Apache-2.0", "MIT", "Llama-3.2", "Gemma", "LFM-1.0"}


def test_the_catalogs_data() -> None:
    models = edgeinfer.catalog()
    assert 30 <= len(models) <= 45
    assert len({model.name for model in models}) == len({model.repo for model in models}) == len(models)
    for model in models:
        assert parse_name(model.name) is None and model.name == model.name.lower() and " " not in model.name
        assert model.hub_name.tag is None or model.is_gguf
        assert model.licence in LICENCES and model.languages and 20 < len(model.purpose) < 80
        # Norms and biases are all that is left out; what is stored twice or less would show. Gemma's heads differ.
        assert model.sizes.parameters == pytest.approx(model.parameters, rel=0.005), model.name
        assert model.sizes.kv_bytes() < model.memory < 300_000_000 + 2 * model.parameters
        assert model.disk < model.memory and model.context >= (1024 if model.kind == "text" else 256)
        assert not model.is_gguf or 4 < 8 * model.disk / model.parameters < 8


def test_memory_is_what_the_formula_says() -> None:
    model = next(model for model in edgeinfer.catalog() if model.name == "qwen3-0.6b")
    weights, cache, process = 596_000_000 * 5.2 / 8, 2 * 28 * 8 * 128 * 4 * 2048, 200_000_000
    assert model.memory == pytest.approx(weights + cache + process, rel=0.001)
    config = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes = DecoderSizes.of(config | {"vocab_size": 10, "num_local_experts": 4})
    assert (sizes.num_key_value_heads, sizes.head_dim, sizes.parameters) == (2, 4, 3808)


def test_families_that_are_converted_are_those_that_have_builders() -> None:
    assert sorted(CONVERTED) == sorted(name for family in ARCHITECTURES for name in family.classes)


def test_names() -> None:
    assert parse_name("Qwen/Qwen3-0.6B") == HubName("Qwen/Qwen3-0.6B")
    assert parse_name("Qwen/Qwen3-0.6B:8bit") == HubName("Qwen/Qwen3-0.6B", bits=8)
    assert (
        str(parse_name("Qwen/Qwen3-0.6B:Auto")) == str(HubName("Qwen/Qwen3-0.6B", bits=AUTO)) == "Qwen/Qwen3-0.6B:auto"
    )
    assert parse_name("org/name-GGUF:Q4_K_M") == HubName("org/name-GGUF", "Q4_K_M")
    assert name_of("Qwen3-0.6b") == HubName("Qwen/Qwen3-0.6B")
    for name, type in (
        ("a/model-Q4_K_M.gguf", "Q4_K_M"),
        ("model.i1-IQ2_XXS.gguf", "IQ2_XXS"),
        ("model-UD-Q4_K_XL-00001-of-00002.gguf", "UD-Q4_K_XL"),
        ("model-bf16.gguf", "BF16"),
        ("model.gguf", None),
    ):
        assert quantization_of(name) == type
    assert gguf_parts("r", ["m-UD-Q4_K_M.gguf", "m-Q4_K_M.gguf"], "Q4_K_M") == ["m-Q4_K_M.gguf"]
    for wrong, says in (
        ("qwen3", "Did you mean qwen3-0.6b"),
        ("smolm2-135m", "Did you mean smollm2-135m"),
        ("tale", "Did you mean tales"),
        ("zzz", "edgeinfer models --catalog"),
        ("cov/llama.gguf", "Check the path."),
        ("./a/b", "OWNER/NAME"),
    ):
        with pytest.raises(ModelError) as caught:
            name_of(wrong)
        assert says in caught.value.hint


def test_the_type_that_is_taken() -> None:
    sizes = {"m-Q2_K.gguf": 2, "m-Q4_K_M.gguf": 4, "m-Q8_0.gguf": 8, "m-F16.gguf": 16, "mmproj-m-F16.gguf": 1}
    repository = Repository("org/gguf", "", {name: size * 10**9 for name, size in sizes.items()}, "gguf")
    for memory, taken in ((40, "Q4_K_M"), (6, "Q4_K_M"), (4, "Q2_K")):
        assert best_offer(repository, memory * 10**9).name == f"org/gguf:{taken}"
    offers = offers_in(repository, 6 * 10**9)
    assert [(offer.type, offer.fits) for offer in offers] == [
        *(("Q2_K", True), ("Q4_K_M", True)),
        *(("Q8_0", False), ("F16", False)),
    ]
    with pytest.raises(BudgetError) as caught:
        best_offer(repository, 10**9)
    assert caught.value.minimum_bytes == offers[0].memory and "org/gguf:Q2_K" in caught.value.hint
    with pytest.raises(HubError, match="Several"):
        gguf_parts("org/gguf", sizes, "m")


def with_generation_config(folder: Path, config: Any) -> Path:
    """The built-in model with another generation_config.json."""
    bundle = folder / "bundle"
    shutil.copytree(BUILTIN, bundle)
    (bundle / "generation_config.json").write_text(json.dumps(config))
    manifest = Manifest.from_json((bundle / "edgeinfer.json").read_text("utf-8"))
    (bundle / "edgeinfer.json").unlink()
    seal(bundle, manifest)
    return bundle


@needs_builtin
def test_the_built_in_model() -> None:
    facts = edgeinfer.describe()
    with edgeinfer.load() as model:
        for name in ("name", "architecture", "parameters", "bits_per_weight", "backend"):
            assert getattr(facts, name) == getattr(model.info, name)
        assert facts.context == model.context
    files = [path for path in BUILTIN.rglob("*") if path.is_file() and path != BUILTIN / "edgeinfer.json"]
    assert facts.bytes == sum(path.stat().st_size for path in files)
    assert facts.sampling == {}


@needs_builtin
@each_row(
    ("config", "sampling"),
    [
        ({"temperature": 0.6, "top_k": 20, "num_beams": 4}, {"temperature": 0.6, "top_k": 20}),
        ({"temperature": 0.6, "do_sample": False}, {}),
        ({"temperature": 0.6, "do_sample": True, "top_p": None}, {"temperature": 0.6}),
        ({"temperature": "hot"}, {}),
        ({"top_p": 7}, {}),
        ({}, {}),
    ],
)
def test_what_its_makers_recommend(tmp_path: Path, config: dict[str, Any], sampling: dict[str, Any]) -> None:
    assert edgeinfer.describe(with_generation_config(tmp_path, config)).sampling == sampling


def test_a_gguf_file_says_it_in_its_metadata(tmp_path: Path) -> None:
    told = {"temp": (FLOAT32, 0.7), "top_k": (INT32, 20), "top_p": (FLOAT32, 0.8), "penalty_last_n": (INT32, 64)}
    model = small_model(**{f"general__sampling__{name}": each for name, each in told.items()})
    path = model.write(tmp_path / "tiny.gguf")
    assert edgeinfer.describe(path).sampling == {"temperature": 0.7, "top_k": 20, "top_p": 0.8}


@needs_builtin
def test_chats_sample_as_its_makers_recommend(tmp_path: Path) -> None:
    message = {"role": "user", "content": "Tell me a story about Tom."}
    plain: dict[str, Any] = {"max_tokens": 12, "seed": 3}
    recommended: dict[str, Any] = {"temperature": 1.3, "top_k": 40}
    with edgeinfer.load(with_generation_config(tmp_path, recommended), speculation="off", remember=False) as model:
        assert model.sampling == recommended

        def reply(**options: Any) -> str:
            return model.chat().send(message["content"], **plain, **options).text

        ids = model.tokenize_chat([message])
        greedy, drawn = (model.generate(ids, **plain, **each).text for each in (dict[str, Any](), recommended))
        assert greedy != drawn
        assert reply() == drawn and reply(temperature=0) == reply(top_k=1) == greedy
        choice = model.create_chat_completion([message], max_tokens=12, seed=3)["choices"][0]
        assert choice["message"]["content"] == drawn
        # A search has its own way to choose tokens.
        assert reply(search="beam", beams=2) == model.generate(ids, **plain, search="beam", beams=2).text
        assert make_completion("response", {"input": "Hello"}, model).opening()[0]["response"]["temperature"] == 1.3


def test_what_cannot_be_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.hub.resolving.cached_snapshot", lambda repo_id: None)
    with pytest.raises(HubError, match="not on this machine"):
        edgeinfer.describe("org/name")
    for wrong in (tmp_path, "no model", tmp_path / "missing"):
        with pytest.raises(ModelError):
            edgeinfer.describe(wrong)
