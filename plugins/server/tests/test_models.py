"""The list of models."""

from __future__ import annotations

import httpx
import openai


def test_the_openai_client_lists_the_served_name(server_url: str) -> None:
    client = openai.OpenAI(base_url=f"{server_url}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "nanovllm"


def test_an_unknown_model_is_404_in_openais_shape(server_url: str) -> None:
    answer = httpx.get(f"{server_url}/v1/models/other")
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "model"
    assert answer.json()["error"]["code"] == "model_not_found"
