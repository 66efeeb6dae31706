"""Embeddings and reranking through the server's three protocols, next to a model that generates, and by that model."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import edgeinfer
from tests.apps.server.served import MESSAGES, Local, served
from tests.encoders import embedder, reranker

TEXTS = ["a cat sat", "the dog ran fast"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("encoders")
    return embedder(folder / "small-bert"), reranker(folder / "small-reranker")


@pytest.fixture(scope="module")
def server(models: tuple[Path, Path]) -> Iterator[Local]:
    with served(embedding=models) as running:
        yield running


def test_vectors_are_those_of_the_model_in_every_protocol(server: Local, models: tuple[Path, Path]) -> None:
    with edgeinfer.load(models[0]) as model:
        expected, ids = model.embed(TEXTS), [model.tokenize(text) for text in TEXTS]
        short = model.embed(TEXTS, dimensions=8).vectors
    for asked in (TEXTS, ids):
        answer = server.post("/v1/embeddings", {"model": str(models[0]), "input": asked, "user": "u"}).json()
        np.testing.assert_allclose([each["embedding"] for each in answer["data"]], expected.vectors, atol=1e-6)
        assert answer["usage"] == {"prompt_tokens": expected.tokens, "total_tokens": expected.tokens}
        assert [each["index"] for each in answer["data"]] == [0, 1]
    body = {"input": TEXTS, "encoding_format": "base64", "dimensions": 8}
    packed = server.post("/v1/embeddings", body).json()["data"]
    found = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in packed]
    np.testing.assert_allclose(found, short, atol=1e-6)
    answer = server.post("/api/embed", {"input": TEXTS[0], "truncate": True}).json()
    np.testing.assert_allclose(answer["embeddings"], expected.vectors[:1], atol=1e-6)
    assert answer["prompt_eval_count"] == len(ids[0]) and answer["total_duration"] > 0
    single = server.post("/api/embeddings", {"prompt": TEXTS[1]}).json()
    np.testing.assert_allclose(single["embedding"], expected.vectors[1], atol=1e-6)


def test_documents_are_ranked(server: Local, models: tuple[Path, Path]) -> None:
    with edgeinfer.load(models[1]) as model:
        expected = model.rerank("a cat", TEXTS)
    body = {"query": "a cat", "documents": [TEXTS[0], {"text": TEXTS[1]}], "return_documents": True}
    answer = server.post("/v1/rerank", body).json()
    assert [each["index"] for each in answer["results"]] == [each.index for each in expected.documents]
    for each, own in zip(answer["results"], expected.documents, strict=True):
        assert each["relevance_score"] == pytest.approx(own.score) and each["document"]["text"] == TEXTS[own.index]
    assert len(server.post("/reranking", body | {"top_n": 1}).json()["results"]) == 1


def test_the_model_that_generates_embeds_and_ranks_by_its_name(server: Local) -> None:
    name = server.get("/v1/models").json()["data"][0]["id"]
    answer = server.post("/v1/embeddings", {"model": name, "input": "Once upon a time"}).json()
    vector = np.array(answer["data"][0]["embedding"])
    assert answer["model"] == name and np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
    ranked = server.post("/v1/rerank", {"model": name, "query": "dog", "documents": TEXTS}).json()["results"]
    assert {each["index"] for each in ranked} == {0, 1} and all(0 <= each["relevance_score"] <= 1 for each in ranked)
    assert server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}).status_code == 200


def test_what_cannot_be_embedded_is_refused(server: Local, models: tuple[Path, Path]) -> None:
    for path, body, said in (
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": ["a", 1]}, "input"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "dimensions": 65}, "dimensions"),
        ("/v1/embeddings", {"input": "a " * 50}, "40"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/api/embed", {"input": "a " * 50, "truncate": False}, "40"),
    ):
        answer = server.post(path, body)
        assert answer.status_code == 400 and said in answer.text, (path, body, answer.text)
    assert server.post("/v1/embeddings", {"model": "large", "input": "a"}).status_code == 404
    assert server.post("/v1/rerank", {"model": str(models[0]), "query": "a", "documents": ["a"]}).status_code == 501


def test_official_clients_read_them(server: Local, models: tuple[Path, Path]) -> None:
    openai, ollama = pytest.importorskip("openai"), pytest.importorskip("ollama")
    with edgeinfer.load(models[0]) as model:
        expected = model.embed(TEXTS).vectors
    with openai.OpenAI(base_url=server.api, api_key="none") as client:  # it asks for base64
        found = client.embeddings.create(model=str(models[0]), input=TEXTS)
    np.testing.assert_allclose([each.embedding for each in found.data], expected, atol=1e-6)
    other = ollama.Client(server.url)
    with contextlib.closing(other._client):  # which it never closes
        answer = other.embed(model=str(models[0]), input=TEXTS)
    np.testing.assert_allclose(answer.embeddings, expected, atol=1e-6)
