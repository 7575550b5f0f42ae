from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from ragcache import RagCache
from ragcache.server.app import create_app


@pytest.fixture
def client(cache: RagCache) -> Iterator[TestClient]:
    with TestClient(create_app(cache)) as client:
        yield client


def events(text: str) -> list[Any]:
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_health(client: TestClient) -> None:
    response = client.get("/health")
    assert response.status_code == 200
    assert response.json()["status"] == "ok"
    assert response.json()["documents"] == 3


def test_an_answer_is_that_of_the_library(client: TestClient, cache: RagCache) -> None:
    response = client.post("/v1/query", json={"question": "Which ships passed?", "top_k": 2, "max_tokens": 5})
    assert response.status_code == 200
    body = response.json()
    expected = cache.query("Which ships passed?", top_k=2, max_tokens=5).model_dump(mode="json")
    del body["timings_ms"], expected["timings_ms"]
    assert body == expected
    assert body["tokens"]["restored"] > 0


def test_a_stream(client: TestClient, cache: RagCache) -> None:
    response = client.post("/v1/query", json={"question": "Which ships passed?", "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    first, *middle, last = events(response.text)
    expected = cache.query("Which ships passed?")
    assert first["type"] == "sources"
    assert [s["chunk_id"] for s in first["sources"]] == [s.chunk_id for s in expected.sources]
    assert {event["type"] for event in middle} == {"text"}
    assert "".join(event["text"] for event in middle) == expected.answer == last["answer"]
    assert last["type"] == "answer"
    assert last["tokens"]["restored"] == expected.tokens.restored


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"question": ""}, 422, "question"),
        ({"question": "  "}, 400, "empty"),
        ({}, 422, "question"),
        ({"question": 5}, 422, "question"),
        ({"question": "x", "nonsense": 1}, 422, "nonsense"),
        ({"question": "x", "top_k": 0}, 400, "top_k"),
        ({"question": "x", "reuse": "some"}, 400, "reuse"),
        ({"question": "x", "temperature": -1, "stream": True}, 400, "temperature"),
        ({"question": "why " * 5000}, 400, "context window"),
        ({"question": "x", "stop": "x"}, 422, "stop"),
    ],
)
def test_bad_requests_say_what_is_wrong(client: TestClient, body: dict[str, Any], status: int, message: str) -> None:
    response = client.post("/v1/query", json=body)
    assert response.status_code == status
    problem = response.json()
    assert set(problem) == {"error", "message"}
    assert message in problem["message"]
    assert "\n" not in problem["message"]


def test_not_json(client: TestClient) -> None:
    response = client.post("/v1/query", content=b"{", headers={"content-type": "application/json"})
    assert response.status_code == 422
    assert set(response.json()) == {"error", "message"}


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/v1/query", 405)])
def test_other_addresses(client: TestClient, method: str, path: str, status: int) -> None:
    response = client.request(method, path)
    assert response.status_code == status
    assert set(response.json()) == {"error", "message"}


def test_a_fault_of_ours_is_told_and_raised(cache: RagCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("ragcache.stream.decode", fail)
    client = TestClient(create_app(cache), raise_server_exceptions=False)
    response = client.post("/v1/query", json={"question": "ships"})
    assert response.status_code == 500
    assert response.json()["error"] == "InternalError"
    streamed = client.post("/v1/query", json={"question": "ships", "stream": True}).text
    assert '"InternalError"' in streamed.splitlines()[-2]


def test_an_empty_store_is_unavailable(client: TestClient, cache: RagCache) -> None:
    cache.delete(["doc-0", "doc-1", "doc-2"])
    response = client.post("/v1/query", json={"question": "ships"})
    assert response.status_code == 503
    assert response.json()["error"] == "StoreError"


def test_damaged_states_are_reported_over_rest(client: TestClient, cache: RagCache) -> None:
    for shard in cache.store.shard_folder.iterdir():
        shard.unlink()
    body = client.post("/v1/query", json={"question": "ships", "top_k": 1}).json()
    assert [miss["reason"] for miss in body["misses"]] == ["missing"]


def test_openapi_describes_the_answer(client: TestClient) -> None:
    schema = client.get("/openapi.json").json()
    answer = schema["components"]["schemas"]["Answer"]["properties"]
    assert {"answer", "sources", "tokens", "timings_ms", "misses", "reuse"} <= set(answer)


def test_a_repaired_answer(client: TestClient, cache: RagCache) -> None:
    options = {"repair": "boundary", "repair_ratio": 0.5, "order": "given", "encodings": ["alone"], "max_tokens": 5}
    body = client.post("/v1/query", json={"question": "Which ships passed?", **options}).json()
    assert body["tokens"]["repaired"] == round(0.5 * body["tokens"]["restored"])
    assert body["answer"] == cache.query("Which ships passed?", **options).answer
    options = {"repair": "query", "repair_ms": 1e-6}
    in_no_time = client.post("/v1/query", json={"question": "Which ships passed?", **options})
    assert in_no_time.json()["tokens"]["repaired"] == 0
