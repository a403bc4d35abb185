"""What an engine goes through: clients that hang up, a training on its device, a violent end. Last, for it is rough."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import httpx
import psutil

from benchmarks.engines.signed_adapters import questions
from store.database import write_session
from store.repositories.leases import acquire, release
from tests.integration.engines.conftest import LENGTH, LIVE, Deployment
from tests.waiting import eventually

USER = questions(1, seed=3)[0]
LONG = {"model": LIVE[0], "messages": USER, "temperature": 0.1, "n": 32, "max_tokens": LENGTH - 100}


def busy(deployment: Deployment) -> float:
    """Seconds of processor time that the engine took within a short while."""
    start_s = cpu_seconds(deployment)
    time.sleep(0.5)
    return cpu_seconds(deployment) - start_s


def cpu_seconds(deployment: Deployment) -> float:
    total = 0.0
    for process in deployment.processes():
        times = process.cpu_times()
        total += times.user + times.system
    return total


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_client_that_hangs_up_ends_the_work(deployment: Deployment) -> None:
    eventually(lambda: busy(deployment) < 0.15)
    try:
        deployment.http.post("/v1/chat/completions", json=LONG, timeout=2.0)
    except httpx.ReadTimeout:
        pass
    else:
        raise AssertionError("it was answered at once, so that nothing is shown")
    eventually(lambda: busy(deployment) < 0.15, within_s=10)
    assert deployment.installation.versions[LIVE[0]].signs(deployment.answer_text(USER, LIVE[0]))


def test_a_training_may_let_it_sleep_while_it_holds_its_device(deployment: Deployment) -> None:
    """On a CPU vLLM only stops to schedule: that the memory is given back is not shown here."""
    if deployment.kind != "vllm":
        return
    with write_session(deployment.installation.store) as session:
        lease = acquire(session, "cpu", "t", "train x", None, at=datetime.now(UTC), ttl=timedelta(hours=1))
    assert lease
    httpx.post(f"{deployment.engine}/sleep?level=1&mode=wait", trust_env=False).raise_for_status()
    eventually(lambda: "asleep" in str(deployment.http.get("/ready").json()))
    assert httpx.get(f"{deployment.engine}/is_sleeping", trust_env=False).json() == {"is_sleeping": True}
    response = deployment.http.post("/v1/chat/completions", json={"model": "base", "messages": USER})
    assert (response.status_code, response.headers["Retry-After"]) == (503, "2")
    with write_session(deployment.installation.store) as session:
        release(session, "cpu", "t")
    eventually(lambda: deployment.http.get("/ready").is_success)
    deployment.until_offered(*LIVE)
    assert deployment.installation.versions[LIVE[1]].signs(deployment.answer_text(USER, LIVE[1]))


def test_a_killed_engine_is_restarted_with_its_adapters(deployment: Deployment) -> None:
    server, *children = deployment.processes()
    victim = server
    if deployment.kind == "vllm":  # not its server, which has to notice
        victim = next(process for process in children if "EngineCore" in " ".join(process.cmdline()))
        # vLLM's server waits without limit for a load that its engine never answers.
        victim.suspend()
        path = deployment.installation.versions[LIVE[0]].path
        late = {"lora_name": "late", "lora_path": str(path)}
        load = partial(httpx.post, f"{deployment.engine}/v1/load_lora_adapter", json=late, trust_env=False, timeout=300)
        waiting = ThreadPoolExecutor(1).submit(load)
        eventually(lambda: waiting.running())
        time.sleep(1)
    victim.kill()
    eventually(lambda: not lives(victim))
    pids: set[Any] = set()

    def has_exited() -> bool:
        answer = deployment.http.post("/v1/chat/completions", json={"model": "base", "messages": USER, "max_tokens": 2})
        pids.add((answer.status_code, "Retry-After" in answer.headers or answer.is_success))
        return answer.status_code == 503

    eventually(has_exited)
    assert pids <= {(200, True), (500, False), (502, True), (503, True)}
    if deployment.outside is not None:
        for process in filter(lives, children):  # its workers outlive it
            process.kill()
        deployment.outside.stop()
        deployment.outside.start()
    eventually(lambda: deployment.http.get("/ready").is_success, within_s=180)
    deployment.until_offered(*LIVE)
    for name in LIVE:
        assert deployment.installation.versions[name].signs(deployment.answer_text(USER, name))
    assert not any(map(lives, (server, *children)))
