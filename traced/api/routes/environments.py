"""Routes for synthetic environments: pages of summaries, and one in full with its admissions."""

from fastapi import APIRouter

from sandbox.admission.report import Panel, advice, bounds, examples, means, panel
from store.database import read_session
from store.records import AdmissionRecord, EnvironmentSummary
from store.repositories.environments import list_adapters_trained_on, list_admissions, list_origins, newest_environments
from store.types import Check
from traced.api.control import Control
from traced.api.errors import NoSuchThing
from traced.api.queries import Limit
from traced.client.environments import (
    AdmissionStatus,
    AdmissionView,
    BoundView,
    CheckView,
    EnvironmentCase,
    EnvironmentView,
    ExampleMessage,
    ExampleView,
    OriginView,
    PanelView,
    RateView,
)

STATUSES: dict[bool | None, AdmissionStatus] = {True: "admitted", False: "refused", None: "unchecked"}


def router(control: Control) -> APIRouter:
    """Build the routes."""
    router = APIRouter()

    @router.get("/environments")
    def page(limit: Limit = 100, after: str | None = None) -> list[EnvironmentView]:
        """A page of environments, newest first; ``after`` is the hash of the last one on the previous page."""
        with read_session(control.store) as session:
            return [_view(summary) for summary in newest_environments(session, limit=limit, after_hash=after)]

    @router.get("/environments/{environment}")
    def case(environment: str) -> EnvironmentCase:
        """An environment in full: source, origins, and all admissions with their checks."""
        with read_session(control.store) as session:
            origins = list_origins(session, environment)
            if not origins:
                raise NoSuchThing(f"the environment {environment!r} does not exist", hint="GET /environments")
            return EnvironmentCase(
                hash=environment,
                source_code=origins[0].source_code,
                origins=[
                    OriginView(
                        cycle_id=origin.cycle_id,
                        capability=origin.capability,
                        seed=origin.seed,
                        synthesizer=origin.synthesizer,
                        at=origin.at,
                    )
                    for origin in origins
                ],
                admissions=[_admission(record) for record in reversed(list_admissions(session, environment))],
                adapters=list_adapters_trained_on(session, [environment])[environment],
            )

    return router


def _view(summary: EnvironmentSummary) -> EnvironmentView:
    fields = vars(summary)
    return EnvironmentView(
        **{name: fields[name] for name in fields if name != "admitted"}, standing=STATUSES[summary.admitted]
    )


def _admission(record: AdmissionRecord) -> AdmissionView:
    checks = [_check(check) for check in record.report.checks]
    return AdmissionView(
        id=record.id, cycle_id=record.cycle_id, at=record.at, admitted=record.report.admitted, checks=checks
    )


def _check(check: Check) -> CheckView:
    return CheckView(
        **vars(check),
        means=means(check.name),
        advice=advice(check),
        panel=_panel(panel(check.evidence)),
        bounds={figure: BoundView(**vars(bound)) for figure, bound in bounds(check.evidence).items()},
        examples=[
            ExampleView(
                seed=example.seed,
                what=example.description,
                transcript=[ExampleMessage(role=role, text=text) for role, text in example.transcript],
            )
            for example in examples(check.evidence)
        ],
    )


def _panel(source: Panel | None) -> PanelView | None:
    if source is None:
        return None
    outside, within_bounds = (
        {name: [RateView(value=rate.value, kept=rate.kept) for rate in row] for name, row in rows.items()}
        for rows in (source.out_of_bounds(), source.within_bounds())
    )
    columns = [f"{field} {needs}".rstrip() for field, needs, _ in source.columns]
    return PanelView(columns=columns, over=outside, others=within_bounds, told=source.remaining_text())
