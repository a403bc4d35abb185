"""Let vLLM sleep during a trainer's update on the same GPU: the trainer's side of the protocol.

The trainer samples through the engine, so the engine is awake during rollouts and sleeps (level 1: weights in host
memory, no key-value cache) while the trainer loads its model and during the update only:

    await sleep.begin_update()      # before the model is loaded, and before the first forward pass
    ...                             # forward, backward, optimizer; then the base moves to host memory
    await sleep.end_update()        # before the new adapter is loaded and the next rollouts begin

Requests that run when the engine is put to sleep are completed first; vLLM queues later ones until it is awake. The
router notices the sleep within half a second, and from then on sends no requests and answers status 503. Before
requests have waited for ``serving.busy_s`` it wakes the engine itself, also during an update. Where engine and base
hold the memory in turns (``start.alternates_with_training``), the engine could not be woken: then the router requests
the device back, and wakes the engine once the training has ended after its iteration.

The engine of a trainer that failed or was killed is woken up by the process that started the trainer
(``traced.training.process``); if that was killed too, by the router once the lease has expired, or by the training when
it is resumed.
"""

import asyncio
import logging
import time
from collections.abc import Sequence

from traced.inference.client import EngineClient
from traced.inference.errors import EngineError, ServingError

POLL_S = 0.5
REFUSALS = 3
log = logging.getLogger(__name__)


class EngineSleep:
    """The sleep of the engines that a trainer samples from.

    Args:
        timeout_s: Seconds in which an engine has to be awake again.
    """

    def __init__(self, clients: Sequence[EngineClient], *, timeout_s: float) -> None:
        self._clients = clients
        self._timeout_s = timeout_s
        self._refusing: set[str] = set()

    async def begin_update(self) -> None:
        """Put the engines to sleep; an engine without sleep mode stays awake and shares the GPU.

        Raises:
            EngineError: An engine does not answer.
        """
        await asyncio.gather(*(self._sleep(client) for client in self._clients if client.url not in self._refusing))

    async def end_update(self) -> None:
        """Wake up all engines and return when they are awake; engines that are awake stay so.

        Raises:
            EngineError: An engine cannot be woken up, for example because the GPU has no memory left.
        """
        await asyncio.gather(*(self._wake(client) for client in self._clients))

    async def _sleep(self, client: EngineClient) -> None:
        give_up_at, refusals = time.monotonic() + self._timeout_s, 0
        while True:
            try:
                # A trainer of this run that was killed may have left it asleep.
                if not await client.is_sleeping():
                    await client.sleep()
                if not await client.is_draining():
                    return
                # It still completes requests, however long they take.
                give_up_at = time.monotonic() + self._timeout_s
            except ServingError as error:
                # An engine that is being restarted is not healthy; one that lives and fails repeatedly cannot sleep.
                refusals += await client.health()
                if not isinstance(error, EngineError) or refusals >= REFUSALS:
                    log.warning("engine %s does not sleep, the update shares the GPU with it: %s", client.url, error)
                    self._refusing.add(client.url)
                    # The call may have taken effect despite the error: the engine must not stay paused.
                    return await self._wake(client)
                if time.monotonic() > give_up_at:
                    raise EngineError(
                        f"the engine at {client.url} could not be put to sleep for {self._timeout_s:g} s: {error}",
                        hint="check the engine with traced status",
                    ) from error
            await asyncio.sleep(POLL_S)

    async def _wake(self, client: EngineClient) -> None:
        give_up_at, problem = time.monotonic() + self._timeout_s, "it completes requests"
        while True:
            try:
                if not await client.is_sleeping():
                    return
                if not await client.is_draining():
                    await client.wake_up()
                    continue
            except ServingError as error:
                problem = str(error)
            if time.monotonic() > give_up_at:
                raise EngineError(
                    f"the engine at {client.url} could not be woken up for {self._timeout_s:g} s: {problem}",
                    hint="engine.gpu_share: a smaller share leaves the trainer more memory",
                )
            await asyncio.sleep(POLL_S)
