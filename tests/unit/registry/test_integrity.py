"""Approval is bound to bytes: the hashes of the store count, not the manifest beside the files."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlmodel import Session

from store.database import open_store, read_session, sqlite_url, write_session
from store.errors import NotApproved
from store.records import Approval, Decision, Promotion, PromotionState
from store.repositories.adapters import begin_quarantine, get_adapter, quarantined_adapters
from store.repositories.events import due_notices, list_audit, list_events
from store.repositories.gates import list_approvals, save_approval
from store.repositories.promotions import live_adapters, promote, put_on_trial, serving_adapters
from tests.unit.registry.chain import ENVIRONMENT, hour, publish_adapter, seed_adapter, seed_cycle
from tests.unit.registry.tampering import WEIGHTS, replace_weights
from traced.config.settings import load_settings
from traced.core.errors import AdapterChanged, PromotionError
from traced.gateway import canaries
from traced.gateway.canaries import Canaries
from traced.registry.canary import Judgement, Verdict
from traced.registry.decision_rules import Action
from traced.registry.decisions import approve, roll_back, start_approved
from traced.registry.integrity import (
    QUARANTINED,
    changed_files,
    check_files,
    folder_state,
    quarantine,
    quarantining,
    stored_version,
)
from traced.registry.verification import Problem, adapter_problems, release, row_problems
from traced.scoring.evidence import Labels

HOOKS = ["tell"]


@dataclass
class Place:
    """A store with two versions of one capability that passed their gates, and their files."""

    store: Engine
    data_dir: Path
    names: list[str]

    def folder(self, name: str) -> Path:
        return self.data_dir / "adapters" / name

    def approve(self, name: str, at: int) -> None:
        with quarantining(self.store, HOOKS, lambda: hour(at)), write_session(self.store) as session:
            approve(session, Action("ann", "local", hour(at)), name)

    def change(self, action: Any, *arguments: Any) -> Any:
        with write_session(self.store) as session:
            return action(session, *arguments)

    def read(self, query: Any, *arguments: Any, **options: Any) -> Any:
        with read_session(self.store) as session:
            return query(session, *arguments, **options)

    def live(self) -> list[str]:
        return [promotion.adapter for promotion in self.read(live_adapters)]

    def problems(self) -> list[Problem]:
        return [*adapter_problems(self.store, "", HOOKS, lambda: hour(50)), *row_problems(self.store)]

    def release(self, name: str) -> None:
        release(self.store, "", Action("ann", "local", hour(60), "restored"), name)

    def notices(self) -> list[str]:
        return [
            notice.body["kind"] for notice in self.read(due_notices, HOOKS, at=hour(99), longest_wait=hour(1) - hour(0))
        ]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    with write_session(store) as session:
        seed_cycle(session)
        names = [seed_adapter(session, tmp_path, number) for number in (1, 2)]
    yield Place(store, tmp_path, names)
    store.dispose()


def test_replaced_weights_with_a_rewritten_manifest_are_refused_at_approval(place: Place) -> None:
    name = place.names[0]
    replace_weights(place.folder(name))
    with pytest.raises(AdapterChanged, match=rf"{name} is not what was published: {WEIGHTS} changed"):
        place.approve(name, 5)
    assert (place.read(list_approvals, name), place.live()) == ([], [])
    assert place.read(quarantined_adapters).keys() == {name}
    # The reason is the quarantine from now on, whatever the files are.
    with pytest.raises(AdapterChanged):
        place.approve(name, 6)
    (event,) = [event for event in place.read(list_events) if event.kind == QUARANTINED]
    assert (event.subject, event.detail["reason"].startswith(WEIGHTS)) == (name, True)
    assert place.notices() == ["adapter-quarantined"]


def test_replaced_weights_with_a_rewritten_manifest_are_never_started(place: Place) -> None:
    name, action = place.names[0], Action("traced cycle", "local", hour(6))
    place.change(save_approval, Approval(name, Decision.APPROVED, "ann", hour(5)))
    replace_weights(place.folder(name))
    with pytest.raises(AdapterChanged), quarantining(place.store, HOOKS, lambda: hour(6)):
        place.change(start_approved, action, [name], "immediate", (0.1,))
    assert place.live() == []
    # The next attempt of the cycle passes over it.
    assert place.change(start_approved, action, [name], "immediate", (0.1,)) == []


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda folder: (folder / WEIGHTS).unlink(), [WEIGHTS]),
        (lambda folder: (folder / "adapter_model.bin").write_bytes(b"pickle"), ["adapter_model.bin"]),
        (lambda folder: (folder / "inner").mkdir() or (folder / "inner" / "x").touch(), ["inner/x"]),
        (lambda folder: _link(folder / WEIGHTS), [WEIGHTS]),
        (lambda folder: (folder / "more").symlink_to(folder), ["more"]),
        (lambda folder: os.mkfifo(folder / "pipe"), ["pipe"]),
        (lambda folder: (folder / "manifest.json").unlink(), []),
        (lambda folder: (folder / "empty").mkdir(), []),
    ],
)
def test_every_kind_of_change_is_found(tmp_path: Path, change: Any, names: list[str]) -> None:
    version = publish_adapter(tmp_path, 1)
    assert changed_files(Path(version.path), version.files) == []
    change(Path(version.path))
    assert changed_files(Path(version.path), version.files) == names


def _link(path: Path) -> None:
    path.symlink_to(path.rename(path.parent.parent / "elsewhere"))


def test_a_folder_that_is_missing_is_no_evidence_of_a_change(place: Place) -> None:
    name = place.names[0]
    place.folder(name).rename(place.data_dir / "unmounted")
    with pytest.raises(PromotionError, match="cannot be read: No such file") as raised:
        place.approve(name, 5)
    assert not isinstance(raised.value, AdapterChanged)
    assert place.read(quarantined_adapters) == {}
    assert [problem.name for problem in place.problems()] == [name]


def test_bytes_that_were_replaced_and_put_back_leave_a_trace(place: Place) -> None:
    folder = place.folder(place.names[0])
    state, times = folder_state(folder), (folder / WEIGHTS).stat()
    assert folder_state(folder) == state
    original = replace_weights(folder)
    replace_weights(folder, original)
    os.utime(folder / WEIGHTS, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert changed_files(folder, stored_version(place.store, place.names[0]).files) == []
    assert folder_state(folder) != state
    state = folder_state(folder)
    folder.rename(folder.with_name("aside"))
    assert folder_state(folder) == ()
    folder.with_name("aside").rename(folder)
    assert folder_state(folder) != state


def test_a_version_in_quarantine_does_not_take_traffic_again_before_it_is_released(place: Place) -> None:
    first, second = place.names
    for number, name in enumerate(place.names):
        place.approve(name, 5 + number)
    original = replace_weights(place.folder(second))
    assert [problem.name for problem in place.problems()] == [second]
    # The log is as it was; what a rollback would restore answers.
    assert (place.live(), place.read(serving_adapters, "bundled")) == ([second], [first])
    with pytest.raises(AdapterChanged):
        place.release(second)
    assert place.read(list_audit)[0].action == "approve"
    replace_weights(place.folder(second), original)
    (problem,) = place.problems()
    assert f"traced verify --release {second}" in problem.text
    assert place.read(serving_adapters, "bundled") == [first]
    place.release(second)
    assert (place.problems(), place.read(serving_adapters, "bundled")) == ([], [second])
    (entry, *_) = place.read(list_audit)
    assert (entry.action, entry.subject, entry.who, entry.reason) == ("release adapter", second, "ann", "restored")
    with pytest.raises(PromotionError, match="is not in quarantine"):
        place.release(second)
    assert place.notices() == ["adapter-quarantined"]


def test_a_rollback_restores_no_version_in_quarantine(place: Place) -> None:
    first, second = place.names
    for number, name in enumerate(place.names):
        place.approve(name, 5 + number)
    with write_session(place.store) as session:
        assert begin_quarantine(session, first, "x changed", at=hour(8))
        assert not begin_quarantine(session, first, "y changed", at=hour(9))
        assert get_adapter(session, first).quarantine_reason == "x changed"
    done = place.change(roll_back, Action("ann", "local", hour(10)), second)
    assert (done.detail["restored"], place.live()) == (None, [])


def test_neither_a_promotion_nor_a_trial_of_a_version_in_quarantine(place: Place) -> None:
    name = place.names[0]
    place.change(save_approval, Approval(name, Decision.APPROVED, "ann", hour(5)))
    quarantine(place.store, AdapterChanged(name, "x changed"), HOOKS, hour(6))

    def start(session: Session, at: datetime) -> None:
        put_on_trial(session, Promotion(name, PromotionState.CANARY, "ann", at, share=0.1))

    with pytest.raises(NotApproved, match="is in quarantine"):
        place.change(start, hour(7))
    with write_session(place.store) as session, pytest.raises(NotApproved, match="is in quarantine"):
        promote(session, name, actor="ann", at=hour(7))


def test_a_canary_whose_weights_were_replaced_does_not_go_live(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canaries, "judge", lambda *_: Judgement(Verdict.FINISH, "it does well"))
    first, second = place.names
    place.approve(first, 5)
    place.change(approve, Action("ann", "local", hour(6)), second, "canary", (0.5,))
    review = Canaries(load_settings(place.data_dir), place.store, Labels((), ())).review
    original = replace_weights(place.folder(second))
    for number in (7, 8):
        review(hour(number))
    assert place.live() == [first]
    assert place.read(quarantined_adapters).keys() == {second}
    replace_weights(place.folder(second), original)
    place.release(second)
    review(hour(70))
    assert place.live() == [second]


def test_environments_and_the_audit_log_are_verified_as_well(place: Place) -> None:
    place.approve(place.names[0], 5)
    place.approve(place.names[1], 6)
    assert place.problems() == []
    with write_session(place.store) as session:
        session.execute(text("UPDATE environments SET source_code = source_code || ' '"))
        session.execute(text("UPDATE audit SET who = 'eve' WHERE seq = 2"))
    assert [(problem.kind, problem.name) for problem in place.problems()] == [
        ("environment", ENVIRONMENT),
        ("audit", "2"),
    ]


def test_what_is_unchanged_passes(place: Place) -> None:
    for name in place.names:
        check_files(stored_version(place.store, name))
