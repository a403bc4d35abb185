"""Synthetic environments: page by page, and one in full with its admissions.

Not covered: playing one, which is an act (``traced.api.episodes``).
"""

from fastapi import APIRouter

from sandbox.admission.report import Panel, advice, bounds, examples, means, panel
from store.database import reading
from store.records import AdmissionRecord, EnvironmentStanding
from store.repositories.environments import list_admissions, list_origins, list_trained_on, newest_environments
from store.types import Check
from traced.api.control import Control
from traced.api.errors import NoSuchThing
from traced.api.queries import Limit
from traced.client.environments import (
    AdmissionView,
    BoundView,
    CheckView,
    EnvironmentCase,
    EnvironmentView,
    ExampleView,
    OriginView,
    PanelView,
    RateView,
    SaidView,
    Standing,
)

STANDINGS: dict[bool | None, Standing] = {True: "admitted", False: "refused", None: "unchecked"}


def router(control: Control) -> APIRouter:
    """Its paths."""
    router = APIRouter()

    @router.get("/environments")
    def page(limit: Limit = 100, after: str | None = None) -> list[EnvironmentView]:
        """Environments, newest first, those behind the one with the hash ``after``."""
        with reading(control.store) as opened:
            return [_view(one) for one in newest_environments(opened, limit=limit, after=after)]

    @router.get("/environments/{environment}")
    def case(environment: str) -> EnvironmentCase:
        """One in full: source, origins, every admission with its checks."""
        with reading(control.store) as opened:
            made = list_origins(opened, environment)
            if not made:
                raise NoSuchThing(f"there is no environment {environment!r}", hint="GET /environments")
            return EnvironmentCase(
                hash=environment,
                source_code=made[0].source_code,
                origins=[
                    OriginView(
                        cycle_id=one.cycle_id,
                        capability=one.capability,
                        seed=one.seed,
                        synthesizer=one.synthesizer,
                        at=one.at,
                    )
                    for one in made
                ],
                admissions=[_admission(one) for one in reversed(list_admissions(opened, environment))],
                adapters=list_trained_on(opened, [environment])[environment],
            )

    return router


def _view(one: EnvironmentStanding) -> EnvironmentView:
    told = vars(one)
    return EnvironmentView(
        **{name: told[name] for name in told if name != "admitted"}, standing=STANDINGS[one.admitted]
    )


def _admission(one: AdmissionRecord) -> AdmissionView:
    checks = [_check(check) for check in one.report.checks]
    return AdmissionView(id=one.id, cycle_id=one.cycle_id, at=one.at, admitted=one.report.admitted, checks=checks)


def _check(check: Check) -> CheckView:
    return CheckView(
        **vars(check),
        means=means(check.name),
        advice=advice(check),
        panel=_panel(panel(check.evidence)),
        bounds={figure: BoundView(**vars(bound)) for figure, bound in bounds(check.evidence).items()},
        examples=[
            ExampleView(
                seed=one.seed, what=one.what, transcript=[SaidView(role=who, text=text) for who, text in one.transcript]
            )
            for one in examples(check.evidence)
        ],
    )


def _panel(of: Panel | None) -> PanelView | None:
    if of is None:
        return None
    over, others = (
        {name: [RateView(value=one.value, kept=one.kept) for one in row] for name, row in rows.items()}
        for rows in (of.over(), of.kept())
    )
    columns = [f"{field} {needs}".rstrip() for field, needs, _ in of.columns]
    return PanelView(columns=columns, over=over, others=others, told=of.others())
