"""Answers in the shadow: what a version on trial would have said, recorded and never shown.

Invariants: a client waits for no shadow; at most ``most`` are asked at once, and only while half of the places at the
engines are free, so that answers come first: what is beyond that is left out and counted. A shadow is asked for what
its request asked for, but not as a stream, and is recorded as an exchange of its own (``shadow_of``).
How it fails: as a record with the engine's status. Not covered: tools, which nobody runs for a shadow: the next request
of the conversation follows the answer that was shown.
"""

import asyncio
import json
from dataclasses import dataclass, field

from traced.serving.gateway.engines import Pool
from traced.serving.gateway.forwarding import Asked
from traced.serving.gateway.limits import Gate
from traced.serving.gateway.upstream import BrokenOff, Unreachable, Upstream

OK, FAILED = 200, 502
GONE = 499


@dataclass
class Shadows:
    """Asks for shadows; ``left_out`` counts those that there was no room for."""

    pool: Pool
    upstream: Upstream
    gate: Gate
    most: int
    left_out: int = 0
    _running: set["asyncio.Task[None]"] = field(default_factory=set)

    def follow(self, asked: Asked, model: str) -> None:
        """Ask ``model`` as well what was ``asked`` and answered."""
        if asked.status != OK:
            return
        if len(self._running) >= self.most or 2 * self.gate.running > self.gate.concurrency:
            self.left_out += 1
            return
        task = asyncio.create_task(self._ask(asked, model))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def end(self) -> None:
        """Give up those that run."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _ask(self, asked: Asked, model: str) -> None:
        replica = self.pool.pick(model, asked.conversation_id)
        if replica is None:
            self.left_out += 1
            return
        body = {**json.loads(asked.raw), "model": replica.upstream(model), "stream": False}
        body.pop("stream_options", None)
        shadow = Asked(
            asked.request, asked.conversation_id, model, json.dumps(body).encode(), body, {}, asked.keep, asked.id
        )
        try:
            with replica.request(model):
                answer = await self.upstream.post(replica.url, asked.request.path, shadow.raw)
                try:
                    shadow.status = answer.status
                    shadow.take(await answer.read())
                finally:
                    answer.close()
            shadow.ended()
        except (Unreachable, BrokenOff) as error:
            shadow.ended(FAILED, str(error))
        except asyncio.CancelledError:
            shadow.ended(GONE, "the router ended")
            raise
