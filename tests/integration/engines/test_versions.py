"""Adapters at every engine: the same weights give the same answers, versions come and go, labels weigh the same."""

import asyncio
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from benchmarks.engines.signed_adapters import RANK, questions, speaker
from benchmarks.versions import race
from store.database import read_session
from store.records import ConversationRoute
from store.repositories.serving import find_routes
from tests.integration.engines.conftest import LIVE, Deployment
from tests.waiting import eventually
from traced.inference.chat_format import ChatFormat
from traced.inference.client import Completion, EngineClient
from traced.inference.embedded.engine import Engine, Request, Sampling
from traced.inference.errors import RequestError, RoutingPromptError
from traced.inference.model_files import BUNDLED, ModelFiles, load_model
from traced.inference.routing_prompt import route_options, routing_prompt
from traced.training.merging import merge

CALLS = [{"order_id": "W1111"}, {"order_id": "W2222"}]
TWO_CALLS = "\n".join(
    f'<tool_call>\n{{"name": "get_order", "arguments": {json.dumps(arguments)}}}\n</tool_call>' for arguments in CALLS
)
RACE = {"embedded": 400, "vllm": 1500, "external": 800}
SKILLS = [("Dates", "Counts days.", "in 3 days"), ("Payment", "Changes a payment.", "pay by card"), ("Tools", "x", "")]


def mild(folder: Path, seed: int = 5) -> Path:
    """An adapter that changes the answers a little, with random weights."""
    model, _ = load_model(ModelFiles("bundled", BUNDLED))
    torch.manual_seed(seed)
    adapted = get_peft_model(
        model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.1)
    adapted.save_pretrained(folder)
    return folder


def merged(folder: Path) -> Path:
    """The merge of two such adapters, as a composition publishes it."""
    members = [mild(folder / str(seed), seed) for seed in (5, 6)]
    merge(members, folder / "merged", "mean", scale=1.0, max_rank=RANK)
    return folder / "merged"


async def loaded(client: EngineClient, name: str, path: Path, conversations: Any) -> list[Completion]:
    """What an adapter answers that is there for as long."""
    await client.load_adapter(name, path)
    try:
        return [await client.chat(name, messages, [], temperature=0.0, max_tokens=16) for messages in conversations]
    finally:
        await client.unload_adapter(name)


@pytest.mark.parametrize("adapter", [mild, merged])
async def test_adapters_answer_the_same_at_every_engine(
    deployment: Deployment, reference: Engine, tmp_path: Path, adapter: Callable[[Path], Path]
) -> None:
    path, conversations = adapter(tmp_path), questions(6, seed=21)
    reference.load_adapter("mild", path)
    prompts = [ChatFormat(reference.tokenizer).render(messages, []) for messages in conversations]
    generations = reference.generate([Request(prompt, Sampling(0.0, 16), "mild") for prompt in prompts])
    base = reference.generate([Request(prompt, Sampling(0.0, 16)) for prompt in prompts])
    reference.unload_adapter("mild")
    assert [generation.ids for generation in generations] != [generation.ids for generation in base]

    async def ask() -> list[Completion]:
        async with EngineClient(deployment.engine, base=deployment.base) as client:
            return await loaded(client, "mild", path, conversations)

    for completion, right in zip(await ask(), generations, strict=True):
        assert completion.completion_ids == right.ids
        assert completion.logprobs == pytest.approx(right.logprobs, abs=2e-3)


async def test_parallel_calls_come_as_they_were_made(deployment: Deployment, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "get_order", "parameters": {"type": "object", "properties": {}}}}
    path = speaker(tmp_path, f"{TWO_CALLS}<|im_end|>", [tool])

    async def ask() -> Completion:
        async with EngineClient(deployment.engine, base=deployment.base) as client:
            await client.load_adapter("caller", path)
            try:
                return await client.chat("caller", questions(1)[0], [tool], temperature=0.0, max_tokens=60)
            finally:
                await client.unload_adapter("caller")

    completions = await ask()
    calls = completions.message["tool_calls"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == CALLS
    assert len({call["id"] for call in calls}) == 2
    assert completions.finish_reason == "tool_calls"


async def test_loading_again_is_a_no_op_and_a_faulty_adapter_is_refused(deployment: Deployment, tmp_path: Path) -> None:
    path = deployment.installation.versions[LIVE[0]]
    async with EngineClient(deployment.engine, base=deployment.base) as client:
        await client.load_adapter("twice", path.path)
        expectation = pytest.raises(RequestError, match="already") if deployment.kind != "embedded" else nullcontext()
        with expectation:  # the embedded engine does nothing
            await client.load_adapter("twice", path.path)
        completion = await client.chat("twice", questions(1)[0], [], temperature=0.0, max_tokens=4)
        assert path.signs(str(completion.message["content"]))
        assert sorted(await client.models()) == sorted([deployment.base, *LIVE, "twice"])
        await client.unload_adapter("twice")
        with pytest.raises(RequestError):
            await client.unload_adapter("twice")
        with pytest.raises(RequestError):
            await client.load_adapter("gone", tmp_path / "nowhere")
        assert sorted(await client.models()) == sorted([deployment.base, *LIVE])


ATTEMPTS = 1000  # until a request has reached the engine


async def test_an_engine_reports_the_adapters_of_its_requests(deployment: Deployment) -> None:
    async with EngineClient(deployment.engine, base=deployment.base) as client:
        is_asked = True

        async def keep_busy(seed: int) -> None:
            while is_asked:
                await client.chat(LIVE[0], questions(40, seed=seed)[0], [], max_tokens=80, seed=seed)

        async with asyncio.TaskGroup() as group:
            for seed in range(6):
                group.create_task(keep_busy(seed))
            for _ in range(ATTEMPTS):
                if used := await client.adapters_in_use(LIVE):
                    break
                await asyncio.sleep(0.02)
            is_asked = False
        assert used == {LIVE[0]}
        assert await client.adapters_in_use(LIVE) == set()


async def test_labels_weigh_the_same_at_every_engine(deployment: Deployment, reference: Engine) -> None:
    options = route_options(SKILLS)
    labels = [option.label for option in options]
    prompt = routing_prompt("Please pay order W1 by card in 3 days.", options)
    ids = reference.tokenizer.encode(prompt)
    (generation,) = reference.generate([Request(ids, Sampling(0.0, 1, top_logprobs=20))])
    top = {reference.tokenizer.decode([token]): logprob for token, logprob in generation.top[0].items()}

    async def ask() -> dict[str, float]:
        async with EngineClient(deployment.engine, base=deployment.base) as client:
            await client.label_ids(labels)
            with pytest.raises(RoutingPromptError, match="not a single token"):
                await client.label_ids([*labels, "quagga"])
            return await client.label_logprobs(prompt, labels)

    assert await ask() == pytest.approx({label: top[label] for label in labels}, abs=1e-3)


def test_a_conversation_is_decided_once_and_recorded(deployment: Deployment) -> None:
    body = {"model": "auto", "messages": questions(1, seed=77)[0], "max_tokens": 4, "temperature": 0}
    first, second = (deployment.http.post("/v1/chat/completions", json=body) for _ in range(2))
    assert first.headers["X-Traced-Model"] == second.headers["X-Traced-Model"]
    conversation = first.headers["X-Traced-Conversation"]

    def routes() -> list[ConversationRoute]:
        with read_session(deployment.installation.store) as session:
            return list(find_routes(session, [conversation]).values())

    # It is stored a moment after the answer.
    (route,) = eventually(routes)
    assert route.why == ""
    assert set(route.logprobs) == {*LIVE, "base"}
    assert route.model == max(route.logprobs, key=lambda name: route.logprobs[name])


def test_a_promotion_loads_and_a_rollback_takes_back(deployment: Deployment) -> None:
    other = "skill-0@v2"
    deployment.installation.promote(other)
    deployment.until_offered(other, LIVE[1])
    assert deployment.installation.versions[other].signs(deployment.answer_text(questions(1)[0], other))
    response = deployment.http.post("/v1/chat/completions", json={"model": LIVE[0], "messages": questions(1)[0]})
    assert response.status_code == 404
    deployment.installation.roll_back(other)
    deployment.until_offered(*LIVE)
    eventually(
        lambda: deployment.installation.versions[LIVE[0]].signs(deployment.answer_text(questions(1)[0], LIVE[0]))
    )


async def raced(deployment: Deployment) -> set[str]:
    """Check the answers of one race, and return the models that have answered."""
    run = await race(deployment.installation, deployment.process.url, RACE[deployment.kind], clients=16, pause_s=0.2)
    failed = [entry for entry in run.other_outcomes if entry.startswith("failed")]
    assert not failed, run.other_outcomes
    if deployment.kind == "external":
        # vLLM's fault on a CPU (traced.inference.vllm_repair), which it was not told to repair.
        assert all(wrong.startswith("base answered") for wrong in run.wrong), run.wrong[:5]
    else:
        assert run.wrong == []
    assert len(run.late) < run.answer_count / 10  # how soon a rollback counts is the benchmark's; here, that it does
    return set(run.answers_by_model)


async def test_no_request_is_answered_by_another_adapter_while_versions_come_and_go(deployment: Deployment) -> None:
    """``benchmarks.versions``, for a few seconds; four versions in three places."""
    models: set[str] = set()
    # On a busy machine a version may come and go without an answer.
    for _ in range(3):
        models |= await raced(deployment)
        if len(models) == 5:
            break
    assert len(models) == 5, models  # the base model and all versions
    for name in LIVE:
        deployment.installation.promote(name)
    deployment.until_offered(*LIVE)
