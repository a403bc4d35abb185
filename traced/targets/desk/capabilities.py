"""The desk's capabilities, and which of them a task needs: for reports only, never for an analyst or a training."""

from traced.targets.desk.scenario import Request, Scenario, pickup_date, scenario
from traced.targets.desk.solution import expected_writes

CAPABILITIES = (
    "structured-data-reasoning",
    "tool-calling-precision",
    "multi-step-completion",
    "precondition-verification",
    "error-recovery",
    "date-reasoning",
)


def needed_capabilities(seed: int) -> set[str]:
    """Return the capabilities without which the task of ``seed`` cannot succeed, guessing aside."""
    return needed_by(scenario(seed))


def needed_by(world: Scenario) -> set[str]:
    """Return the capabilities without which a scenario cannot succeed, guessing aside."""
    names: set[str] = set()
    if len(world.requests) > 1:
        names.add("multi-step-completion")
    for request in world.requests:
        names |= _needed_by_request(world, request)
    return names


def _needed_by_request(world: Scenario, request: Request) -> set[str]:
    order = world.database["orders"][request.order_id]
    match request.kind:
        case "return":
            return {"tool-calling-precision"}
        case "exchange":
            return {"structured-data-reasoning"}
        case "cancel" if order["status"] not in world.cancellable:
            return {"precondition-verification"}
        case "pickup":
            requested_day, booked = pickup_date(world, request.days)
            return {"date-reasoning"} | ({"precondition-verification"} if requested_day != booked else set())
        case "payment" if expected_writes(world, request)[0][1]["payment_id"] != request.payment_id:
            return {"error-recovery"}
    return set()
