"""One tokenizer for all tests of the API, and one server for those that speak HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from surefoot import checkpoint
from surefoot.api.tokenizer import Tokenizer, load_tokenizer
from surefoot.config import ServerConfig
from tests.api.fake import FakeEngine, served
from tests.api.glm import write_tokenizer


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    return load_tokenizer(checkpoint.find("smollm2"))


@pytest.fixture(scope="session")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """GLM-4's tokenizer with a vocabulary of bytes: a model that knows tools."""
    folder = tmp_path_factory.mktemp("glm")
    write_tokenizer(folder)
    return load_tokenizer(checkpoint.Checkpoint(kind="hf", path=folder, name="glm"))


@pytest.fixture(scope="session")
def _server(smollm2: Tokenizer) -> Iterator[tuple[str, FakeEngine]]:
    engine = FakeEngine(smollm2)
    config = ServerConfig(served_model_name=("smollm2", "other/name"), max_body_bytes=1 << 20)
    with served(engine, smollm2, config) as url:
        yield url, engine


@pytest.fixture
def engine(_server: tuple[str, FakeEngine]) -> FakeEngine:
    _server[1].reset()
    return _server[1]


@pytest.fixture(scope="session")
def _clients(_server: tuple[str, FakeEngine]) -> Iterator[tuple[httpx.Client, openai.OpenAI]]:
    url = _server[0]
    with (
        httpx.Client(base_url=url, timeout=10) as http,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10) as client,
    ):
        yield http, client


@pytest.fixture
def http(_clients: tuple[httpx.Client, openai.OpenAI], engine: FakeEngine) -> httpx.Client:
    return _clients[0]


@pytest.fixture
def client(_clients: tuple[httpx.Client, openai.OpenAI], engine: FakeEngine) -> openai.OpenAI:
    return _clients[1]
