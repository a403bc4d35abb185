"""Run the users against the router, restart it when half of them are done, and give feedback on a sample of answers."""

import asyncio
import random
from collections.abc import Sequence

import openai

from benchmarks.identity.clients import Clients
from benchmarks.identity.judge import FeedbackTrial
from benchmarks.identity.ledger import Ledger, Request, note_response
from benchmarks.identity.personas import PERSONAS
from benchmarks.identity.place import Place
from benchmarks.identity.population import KEYS, Profile
from benchmarks.identity.talk import User

CONCURRENT_USERS = 64
FEEDBACK_SAMPLE = 200
# Of this share of the sample, another key tries it first.
OTHER_KEY_SHARE = 0.25
CONCURRENT_FEEDBACK = 16


async def simulate(place: Place, profiles: Sequence[Profile], seed: int) -> tuple[Ledger, list[FeedbackTrial]]:
    """Return what is true of the requests, and the results of feedback; raises what a client raises in the end."""
    ledger, router_up = Ledger(), asyncio.Event()
    router_up.set()
    hooks = {"response": [note_response]}
    async with openai.DefaultAsyncHttpxClient(event_hooks=hooks, trust_env=False, verify=False) as http:
        clients = {name: Clients(place.url, key, http) for name, key in place.keys.items()}
        waiting, finished = iter(profiles), 0

        async def work() -> None:
            nonlocal finished
            for profile in waiting:
                user = User(profile, clients[profile.key], ledger, router_up)
                for _ in range(profile.conversations):
                    await PERSONAS[profile.persona](user)
                finished += 1
                if finished == len(profiles) // 2:
                    await _restart(place, router_up)

        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENT_USERS):
                group.create_task(work())
    return ledger, await _give_feedback(place, ledger, random.Random(f"{seed} feedback"))


async def _restart(place: Place, router_up: asyncio.Event) -> None:
    router_up.clear()
    await asyncio.to_thread(place.stop_router)
    await asyncio.to_thread(place.start_router)
    router_up.set()


async def _give_feedback(place: Place, ledger: Ledger, draw: random.Random) -> list[FeedbackTrial]:
    candidates = [
        request for request in ledger.requests if request.answered_attempt is not None and request.response_id
    ]
    sample = draw.sample(candidates, min(FEEDBACK_SAMPLE, len(candidates) // 4))
    slots = asyncio.Semaphore(CONCURRENT_FEEDBACK)
    async with openai.DefaultAsyncHttpxClient(base_url=place.url, trust_env=False, verify=False, timeout=60.0) as http:

        async def post(request: Request, key: str) -> tuple[int, str]:
            body = {"response_id": request.response_id, "score": 1.0}
            headers = {"Authorization": f"Bearer {place.keys[key]}"}
            response = await http.post("/v1/feedback", json=body, headers=headers)
            return response.status_code, str(response.json().get("conversation_id") or "")

        async def give(request: Request, other_key: str) -> FeedbackTrial:
            async with slots:
                other_status = (await post(request, other_key))[0] if other_key else 0
                return FeedbackTrial(request, *await post(request, request.conversation.key), other_status)

        jobs = []
        for request in sample:
            other_keys = [name for name in KEYS if name != request.conversation.key]
            is_tried = draw.random() < OTHER_KEY_SHARE
            jobs.append(give(request, draw.choice(other_keys) if is_tried else ""))
        return await asyncio.gather(*jobs)
