"""The desk's ten tools: OpenAI schemas and their effects on the database.

Results are compact JSON strings; a refusal is ``{"error": ...}``. As in τ-bench, the tools do not enforce the policy:
``cancel_order`` cancels a shipped order.
"""

import json
from collections.abc import Callable
from typing import Any

from traced.targets.desk.scenario import REASONS, Record, next_open


class ToolRefusal(Exception):
    """A tool call that is refused; its text is the tool's error."""


def _schema(name: str, description: str, **parameters: Record) -> Record:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": parameters, "required": list(parameters)},
        },
    }


def _text(description: str, **keywords: Any) -> Record:
    return {"type": "string", "description": description, **keywords}


_ORDER = _text("Order number, such as W1234")
_ITEM = _text("Item number, such as I123")
_DATE = _text("Date as YYYY-MM-DD", format="date")

TOOLS: list[Record] = [
    _schema("get_customer", "Look up a customer and their payments.", customer_id=_text("Customer number, as C123")),
    _schema("get_order", "Look up an order: status, payment and items.", order_id=_ORDER),
    _schema("get_product", "Look up a product and its variants.", product_id=_text("Product number, as T12")),
    _schema("get_calendar", "Look up whether pickups run on a day, and the next open day.", date=_DATE),
    _schema(
        "return_item",
        "Return an item of an order.",
        order_id=_ORDER,
        item_id=_ITEM,
        reason=_text("The customer's reason", enum=[*REASONS, "other"]),
    ),
    _schema(
        "exchange_item",
        "Exchange an item of an order for another variant.",
        order_id=_ORDER,
        item_id=_ITEM,
        new_item_id=_text("Item number of the variant wanted"),
    ),
    _schema("cancel_order", "Cancel an order.", order_id=_ORDER),
    _schema("schedule_pickup", "Book the pickup of an order.", order_id=_ORDER, date=_DATE),
    _schema("change_payment", "Change the payment of an order.", order_id=_ORDER, payment_id=_text("As P12")),
    _schema("transfer_to_human", "Hand the conversation to a person.", summary=_text("What the customer wants")),
]
PARAMETERS: dict[str, tuple[str, ...]] = {
    t["function"]["name"]: tuple(t["function"]["parameters"]["required"]) for t in TOOLS
}
WRITES = ("return_item", "exchange_item", "cancel_order", "schedule_pickup", "change_payment", "transfer_to_human")


def call(database: Record, name: str, arguments: str) -> str:
    """Run a tool call on the database and return its result as JSON text; never raises."""
    try:
        return json.dumps(_run(database, name, arguments), separators=(",", ":"))
    except ToolRefusal as refusal:
        return json.dumps({"error": str(refusal)}, separators=(",", ":"))


def _run(database: Record, name: str, arguments: str) -> Record:
    if name not in PARAMETERS:
        raise ToolRefusal(f"unknown tool {name[:40]}")
    try:
        parsed_arguments = json.loads(arguments)
    # RecursionError: a model may produce arguments nested deeper than the parser allows.
    except (json.JSONDecodeError, TypeError, RecursionError):
        raise ToolRefusal("arguments are not JSON") from None
    if not isinstance(parsed_arguments, dict) or set(parsed_arguments) != set(PARAMETERS[name]):
        raise ToolRefusal(f"{name} needs {', '.join(PARAMETERS[name])}")
    if not all(isinstance(value, str) for value in parsed_arguments.values()):
        raise ToolRefusal("every argument is a string")
    return _TOOL_FUNCTIONS[name](database, **parsed_arguments)


def _find(database: Record, table: str, key: str) -> Record:
    if key not in database[table]:
        raise ToolRefusal(f"{key[:20]} not found")
    record: Record = database[table][key]
    return record


def _find_item(database: Record, order_id: str, item_id: str) -> Record:
    for item in _find(database, "orders", order_id)["items"]:
        if item["item_id"] == item_id:
            record: Record = item
            return record
    raise ToolRefusal(f"{item_id[:20]} is not in order {order_id}")


def _get_customer(database: Record, customer_id: str) -> Record:
    return _find(database, "customers", customer_id)


def _get_order(database: Record, order_id: str) -> Record:
    return _find(database, "orders", order_id)


def _get_product(database: Record, product_id: str) -> Record:
    return _find(database, "products", product_id)


def _get_calendar(database: Record, date: str) -> Record:
    try:
        open_day = next_open(database, date)
    except ValueError:
        raise ToolRefusal(f"{date[:20]} is no date") from None
    return {"date": date, "open": open_day == date, "next_open": open_day}


def _return_item(database: Record, order_id: str, item_id: str, reason: str) -> Record:
    item = _find_item(database, order_id, item_id)
    if reason not in REASONS and reason != "other":
        raise ToolRefusal(f"{reason[:20]} is no reason")
    database["returns"][f"{order_id}/{item_id}"] = reason
    return {"ok": True, "refund": item["price"]}


def _exchange_item(database: Record, order_id: str, item_id: str, new_item_id: str) -> Record:
    item = _find_item(database, order_id, item_id)
    product = _find(database, "products", item["product_id"])
    if new_item_id not in [variant["item_id"] for variant in product["variants"]]:
        raise ToolRefusal(f"{new_item_id[:20]} is no variant of {item['name']}")
    database["exchanges"][f"{order_id}/{item_id}"] = new_item_id
    return {"ok": True}


def _cancel_order(database: Record, order_id: str) -> Record:
    _find(database, "orders", order_id)["status"] = "cancelled"
    return {"ok": True}


def _schedule_pickup(database: Record, order_id: str, date: str) -> Record:
    _find(database, "orders", order_id)
    database["pickups"][order_id] = date
    return {"ok": True}


def _change_payment(database: Record, order_id: str, payment_id: str) -> Record:
    order = _find(database, "orders", order_id)
    payments = database["customers"][order["customer_id"]]["payments"]
    payment_states = {payment["payment_id"]: payment["active"] for payment in payments}
    if payment_id not in payment_states:
        raise ToolRefusal(f"{payment_id[:20]} not found")
    if not payment_states[payment_id]:
        raise ToolRefusal(f"{payment_id} has expired")
    order["payment_id"] = payment_id
    return {"ok": True}


def _transfer_to_human(database: Record, summary: str) -> Record:
    database["transfers"].append(summary)
    return {"ok": True}


_TOOL_FUNCTIONS: dict[str, Callable[..., Record]] = {
    "get_customer": _get_customer,
    "get_order": _get_order,
    "get_product": _get_product,
    "get_calendar": _get_calendar,
    "return_item": _return_item,
    "exchange_item": _exchange_item,
    "cancel_order": _cancel_order,
    "schedule_pickup": _schedule_pickup,
    "change_payment": _change_payment,
    "transfer_to_human": _transfer_to_human,
}
