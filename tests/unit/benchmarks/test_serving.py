"""The aims of the benchmark of routers: which cases count, and what was not measured."""

from dataclasses import replace

from benchmarks.serving.__main__ import CONCURRENCIES, Case, figures_of


def cases(router: str, model: str, p50_ms: float, per_s: float, *, keys_and_records: bool = True) -> list[Case]:
    return [
        Case(router, keys_and_records, model, concurrency, streamed, 1.0, p50_ms, 2 * p50_ms, per_s, 0)
        for streamed in (False, True)
        for concurrency in CONCURRENCIES
    ]


TRACED = [*cases("traced", "base", 1.0, 1000), *cases("traced", "auto", 1.9, 600)]
PEERS = [*cases("litellm", "base", 30.0, 100), *cases("vllm-router", "base", 0.6, 2000, keys_and_records=False)]


def test_all_aims_are_reached() -> None:
    figures = figures_of([*TRACED, *PEERS])
    assert figures["meets"]
    assert figures["throughput_over_litellm"] == 10
    assert figures["auto_throughput_over_base"] == 0.6
    # With the engine's own millisecond.
    assert figures["latency_over_vllm_router"] == 2.0 / 1.6
    assert figures["auto_latency_over_base"] == 2.9 / 2.0


def test_like_is_compared_with_like() -> None:
    plain_cases = [
        *cases("traced", "base", 0.3, 3000, keys_and_records=False),
        *cases("litellm", "base", 20, 200, keys_and_records=False),
    ]
    figures = figures_of([*TRACED, *PEERS, *plain_cases])
    plain_figures = figures["without_keys_and_records"]
    assert plain_figures["throughput_over_litellm"] == 15
    assert plain_figures["overhead_over_vllm_router"] == 0.5
    assert figures["throughput_over_litellm"] == 10


def test_one_slow_case_or_a_failed_request_misses() -> None:
    slow = [*TRACED, *cases("traced", "auto", 1.9, 400)[-1:]]
    assert not figures_of([*slow, *PEERS])["reached"]["auto_throughput_over_base"]
    failed_case = replace(TRACED[0], failed=1)
    assert not figures_of([*TRACED[1:], failed_case, *PEERS])["meets"]


def test_what_was_not_measured_is_not_reached() -> None:
    figures = figures_of(TRACED)
    assert figures["throughput_over_litellm"] is None
    assert figures["reached"] == {
        "throughput_over_litellm": False,
        "overhead_over_vllm_router": False,
        "auto_throughput_over_base": True,
        "auto_overhead_over_base": True,
    }
