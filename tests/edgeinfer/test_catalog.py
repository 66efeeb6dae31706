"""The catalog's data, names of models, and which of a repository's GGUF files is taken."""

from __future__ import annotations

import pytest

import edgeinfer
from edgeinfer.bundle.names import quantization_of
from edgeinfer.errors import BudgetError, HubError, ModelError
from edgeinfer.export.architectures import ARCHITECTURES
from edgeinfer.hub.catalog_models import DecoderSizes, gguf_memory
from edgeinfer.hub.download import Repository, best_offer, offers_in
from edgeinfer.hub.ids import HubName, gguf_parts, parse_name
from edgeinfer.hub.resolving import name_of
from edgeinfer.hub.catalog_models import CONVERTED
from tests.recorded import check_recorded

LICENCES = {"Apache-2.0", "MIT", "Llama-3.2", "Gemma"}


def test_the_catalogs_data() -> None:
    models = edgeinfer.catalog()
    assert 15 <= len(models) <= 25
    assert len({model.name for model in models}) == len({model.repo for model in models}) == len(models)
    for model in models:
        assert parse_name(model.name) is None and model.name == model.name.lower() and " " not in model.name
        assert model.hub_name.tag is None or model.is_gguf
        assert model.licence in LICENCES and model.languages and 20 < len(model.purpose) < 80
        # Norms and biases are all that is left out; what is stored twice or less would show. Gemma's heads differ.
        assert model.sizes.parameters == pytest.approx(model.parameters, rel=0.005), model.name
        assert model.sizes.kv_bytes() < model.memory < 300_000_000 + 2 * model.parameters
        assert model.disk < model.memory and model.context >= 1024
        assert not model.is_gguf or 4 < 8 * model.file_bytes / model.parameters < 8


def test_memory_is_what_the_formula_says() -> None:
    model = next(model for model in edgeinfer.catalog() if model.name == "qwen3-0.6b")
    weights, cache, process = 596_000_000 * 4.25 / 8, 2 * 28 * 8 * 128 * 4 * 2048, 200_000_000
    assert model.memory == pytest.approx(weights + cache + process, rel=0.001)
    config = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes = DecoderSizes.of(config | {"vocab_size": 10, "num_local_experts": 4})
    assert (sizes.num_key_value_heads, sizes.head_dim, sizes.parameters) == (2, 4, 3808)


def test_memory_is_what_it_was() -> None:
    config = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 50,
    }
    mixture = {"num_experts": 6, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 40, "head_dim": 24}
    found = {}
    for name, more in (
        ("plain", {}),
        ("tied", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
        ("mixture", mixture),
    ):
        sizes = DecoderSizes.of(config | more)
        memory = [sizes.memory(bits) for bits in (2, 4, 8, 32)]
        found[name] = [sizes, sizes.parameters, memory, gguf_memory(10**6, sizes), sizes.kv_bytes(100)]
    check_recorded(
        "estimates",
        found | {"file": gguf_memory(10**9), "catalog": {m.name: [m.memory, m.download] for m in edgeinfer.catalog()}},
    )


def test_families_that_are_converted_are_those_that_have_builders() -> None:
    assert sorted(CONVERTED) == sorted(name for family in ARCHITECTURES for name in family.classes)


def test_names() -> None:
    assert parse_name("Qwen/Qwen3-0.6B") == HubName("Qwen/Qwen3-0.6B")
    assert parse_name("Qwen/Qwen3-0.6B:8bit") == HubName("Qwen/Qwen3-0.6B", bits=8)
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
