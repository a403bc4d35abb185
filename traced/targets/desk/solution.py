"""The ground truth of a task of the desk: the writes that serve it, and what the user must hear."""

import copy
import json

from traced.targets.desk import tools
from traced.targets.desk.scenario import Record, Request, Scenario, pickup_date


def expected_writes(world: Scenario, request: Request) -> list[tuple[str, dict[str, str]]]:
    """Return the writes that serve a request under the policy: (tool, arguments)."""
    order = request.order_id
    match request.kind:
        case "return":
            return [("return_item", {"order_id": order, "item_id": request.item_id, "reason": request.reason})]
        case "exchange":
            arguments = {"order_id": order, "item_id": request.item_id, "new_item_id": matching_variant(world, request)}
            return [("exchange_item", arguments)]
        case "cancel" if world.database["orders"][order]["status"] in world.cancellable:
            return [("cancel_order", {"order_id": order})]
        case "pickup":
            return [("schedule_pickup", {"order_id": order, "date": pickup_date(world, request.days)[1]})]
        case "payment":
            payments = world.database["customers"][world.customer_id]["payments"]
            active = next(p["payment_id"] for p in payments if p["active"])
            return [("change_payment", {"order_id": order, "payment_id": active})]
    return []


def matching_variant(world: Scenario, request: Request) -> str:
    """Return the item number of the variant that matches the user's latest wish."""
    attributes = request.changed_variant or request.variant
    variants = world.database["products"][request.product_id]["variants"]
    return next(str(v["item_id"]) for v in variants if all(v[k] == value for k, value in attributes.items()))


def expected_database(world: Scenario) -> Record:
    """Return the ground truth: the expected writes applied to a fresh database."""
    database = copy.deepcopy(world.database)
    for request in world.requests:
        for name, arguments in expected_writes(world, request):
            tools.call(database, name, json.dumps(arguments))
    return database


def expected_facts(world: Scenario) -> list[str]:
    """Return what the user must hear; a fact that two requests share must be said twice."""
    facts = []
    for request in world.requests:
        order = world.database["orders"][request.order_id]
        if request.kind == "return":
            facts.append(f"{world.refund_days} days")
        elif request.kind == "cancel" and order["status"] not in world.cancellable:
            facts.append(order["status"])
        elif request.kind == "pickup":
            facts.append(pickup_date(world, request.days)[1])
        elif request.kind == "lookup" and request.lookup_field == "status":
            facts.append(order["status"])
        elif request.kind == "lookup":
            facts.append(str(next(i["price"] for i in order["items"] if i["name"] == request.item)))
    return facts
