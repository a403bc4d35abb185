"""Which certificates a client of a model's server trusts."""

import ssl
from typing import Any

import openai
import pytest
from pydantic import SecretStr

from agents.errors import ModelDenied
from agents.llm.endpoint import Endpoint
from agents.llm.server import open_client


@pytest.mark.parametrize(
    ("url", "trusts"),
    [
        ("http://127.0.0.1:1/v1", False),
        ("http://localhost:1/v1", False),
        ("https://127.0.0.1:1/v1", True),
        ("http://models.example/v1", True),  # a proxy of the environment may use TLS
        ("https://models.example/v1", True),
    ],
)
async def test_only_a_local_server_without_tls_needs_no_certificates(
    monkeypatch: pytest.MonkeyPatch, url: str, trusts: bool
) -> None:
    options: list[dict[str, Any]] = []

    def record(**values: Any) -> None:
        options.append(values)
        raise ValueError("only the options are wanted")

    monkeypatch.setattr(openai, "DefaultAsyncHttpxClient", record)
    with pytest.raises(ModelDenied, match="only the options"):
        async with open_client(Endpoint(url, "m", SecretStr("k"))):
            pass
    verify = options[0]["verify"]
    assert (verify is True) is trusts
    if not trusts:
        assert isinstance(verify, ssl.SSLContext)
        assert verify.cert_store_stats()["x509_ca"] == 0
