"""A client of engines over the gateway's kept-alive connections.

A routing decision waits for one small request to the engine. aiohttp's client took more time for it than the gateway
takes for the whole request of a client.
"""

import asyncio
from collections.abc import Mapping

from traced.core.fast_json import write_json
from traced.gateway.upstream import ConnectionLost, EngineUnreachable, Upstream
from traced.inference.client import EngineClient, HttpAnswer, no_answer


class GatewayEngineClient(EngineClient):
    """Sends its POST requests through ``upstream``."""

    def __init__(self, url: str, upstream: Upstream, *, silence_s: float, key: str) -> None:
        super().__init__(url, silence_s=silence_s, key=key)
        self._upstream = upstream

    async def aclose(self) -> None:
        """Close the connections that no request uses."""
        await super().aclose()
        self._upstream.close_idle(self.url)

    async def _exchange(self, method: str, path: str, body: Mapping[str, object] | None) -> HttpAnswer:
        if method != "POST":
            return await super()._exchange(method, path, body)
        try:
            async with asyncio.timeout(self.silence_s):
                answer = await self._upstream.post(self.url, path, write_json(body))
                try:
                    content = await answer.read()
                finally:
                    answer.close()
        except (EngineUnreachable, ConnectionLost) as error:
            raise no_answer(self.url + path, str(error)) from error
        except TimeoutError as error:
            raise no_answer(self.url + path, f"nothing for {self.silence_s:g} s (engine.silence_s)") from error
        text = content.decode("utf-8", "replace")
        return HttpAnswer(answer.status, answer.content_type, answer.header("retry-after"), text)
