"""Trajectories through the control API: pages, one in full, the other trials of its task."""

from pathlib import Path

from sqlalchemy import Engine

from store.database import write_session
from store.records import Feedback
from store.repositories.serving import save_feedback
from store.repositories.trajectories import save_trajectories
from store.types import Outcome
from tests.integration.service.api_server import OPERATOR, READER, expect_refusal, on_tcp, serve_api
from tests.unit.store.chain import CAPABILITY, T0, trajectory
from traced.api.control import Control
from traced.client.trajectories import TrajectoryQuery


async def test_pages_filters_and_choices(control: Control, path: Path) -> None:
    async with serve_api(control, path) as client:
        first = await client.trajectories.page(TrajectoryQuery(limit=2))
        assert ([row.id for row in first.rows], first.next) == (["t3", "t1"], "t1")
        rest = await client.trajectories.page(after=first.next)
        assert ([row.id for row in rest.rows], rest.next, rest.gave_up) == (["t2"], None, False)
        second_row = first.rows[1]
        assert (second_row.task_id, second_row.outcome, second_row.messages, second_row.asked) == (
            "41",
            "failure",
            3,
            "I am t1",
        )
        query = TrajectoryQuery(capability=CAPABILITY.name, label="lacking", outcome="failure", text="I AM")
        page = await client.trajectories.page(query)
        assert page.cycle_id == "c1"
        assert [(row.id, row.verdicts) for row in page.rows] == [("t1", {"lacking": 2})]
        choices = await client.trajectories.choices()
        assert (choices.sources, choices.cycles[0].capabilities) == (["desk"], [CAPABILITY.name])
        assert [row.id for row in await client.trajectories.trials("t1")] == ["t2"]


async def test_one_in_full_with_its_labels_and_who_judged_it(control: Control, path: Path, store: Engine) -> None:
    odd = "a/../%2e?#\u202e\x1b"
    with write_session(store) as session:
        production = trajectory(odd, Outcome.SUCCESS, cycle_id=None, started_at=T0, customer="customer-ab12")
        save_trajectories(session, [production])
        save_feedback(session, Feedback(odd, T0, score=1.0, comment="well done", who="Ada"))
    async with serve_api(control, path) as client:
        view = await client.trajectories.get("t1")
        assert view.messages[0]["content"] == "Be exact. \u2028 \ufffd \x00"
        assert view.messages[2]["tool_calls"] == [{"z": 1, "a": 2}]
        assert (view.by, view.said) == ("source", None)
        assert [(run.run, run.verdict, run.message_index) for run in view.labels[0].runs] == [
            (0, "lacking", 2),
            (1, "lacking", 2),
        ]
        judged_view = await client.trajectories.get(odd)
        assert (judged_view.started_at, judged_view.customer) == (T0, "customer-ab12")
        starts = {row.id: row.started_at for row in (await client.trajectories.page(TrajectoryQuery())).rows}
        assert (starts[odd], starts["t1"]) == (T0, None)
        assert judged_view.said is not None
        assert (judged_view.id, judged_view.by, judged_view.said.who, judged_view.said.comment) == (
            odd,
            "people",
            "Ada",
            "well done",
        )


async def test_what_cannot_be_asked_is_refused_with_why(control: Control, path: Path) -> None:
    async with serve_api(control, path) as client:
        assert (await expect_refusal(client.trajectories.get("none"))).status == 404
        assert (await expect_refusal(client.trajectories.trials("none"))).status == 404
        assert "the previous page" in (await expect_refusal(client.trajectories.page(after="none"))).hint
        too_many = TrajectoryQuery().model_copy(update={"limit": 5000})
        assert (await expect_refusal(client.trajectories.page(too_many))).status == 422
    for token, status in ((READER, None), (OPERATOR, None), ("x" * 30, 401)):
        async with on_tcp(control, token) as client:
            if status is None:
                assert (await client.trajectories.page()).rows
            else:
                assert (await expect_refusal(client.trajectories.page())).status == status
