"""The machine on the overview: devices as table rows; router, engines and parts as lines of symbol, name and state."""

from rich.text import Text

from traced.client.models import DeviceView, Readiness
from traced.client.serving import Health, RouterHealth, Traffic
from tui.text import cell, sanitize_line
from tui.widgets.tables import Row

GIB = 2**30
BAR, STEPS, EMPTY = 5, " ▏▎▍▌▋▊▉█", "░"
# Models, engines and reasons that are listed by name; the rest are counted.
MAX_ITEMS = 3


def device_rows(devices: list[DeviceView]) -> list[Row]:
    """Return one row per device: its use, its memory and its lease."""
    return [Row(device.id, _device(device)) for device in devices]


def _device(device: DeviceView) -> list[Text]:
    name = f"{device.name} {device.id.removeprefix('GPU-')[:8]}"
    # For the CPU only the use by other processes is shown: the service's own work is no obstacle to training.
    if device.kind == device.id:
        name = f"{device.kind}, {device.name.rpartition(', ')[2]}: others"
    memory = f"{device.memory_used / GIB:.0f}/{device.memory_total / GIB:.0f} GiB"
    if device.lease is not None:
        waiter = f", requested by {device.lease.wanted_by}" if device.lease.wanted_by else ""
        holder = cell(f"▶ {device.lease.purpose}{waiter}", "bold cyan", 80)
    elif device.idle:
        holder = cell("✓ free", "green")
    else:
        holder = cell(f"· {'; '.join(device.why_not)}", "dim", 120)
    return [cell(name, limit=32), _use(device.utilisation), cell(f"{memory:>10}"), holder]


def _use(share: float | None) -> Text:
    if share is None:
        return Text(f"{'?':>5} {EMPTY * BAR}", "dim")
    eighths = min(max(round(share * BAR * 8), 0), BAR * 8)
    full = "█" * (eighths // 8) + (STEPS[eighths % 8] if eighths % 8 else "")
    return Text(f"{100 * share:3.0f} % ").append(full, "cyan").append(EMPTY * (BAR - len(full)), "dim")


def health_lines(health: Health | None, readiness: Readiness | None, width: int) -> Text:
    """Return the lines on the router, its traffic and the parts of the service."""
    summary = Text(no_wrap=True, overflow="ellipsis")
    for mark, style, name, text in [*_router(health), *_parts(readiness)]:
        summary.append(f"{mark} ", style).append(f"{name:<9}", "bold").append(
            sanitize_line(text, width * 2), style * (mark == "✗")
        )
        summary.append("\n")
    summary.right_crop(1)
    return summary


def _router(health: Health | None) -> list[tuple[str, str, str, str]]:
    if health is None:
        return [("·", "dim", "router", "…")]
    mark, style, text = _state(health.router)
    lines = [(mark, style, "router", text)]
    for url, state in list(health.router.engines.items())[:MAX_ITEMS]:
        well = state == "ok"
        lines.append(
            ("✓" if well else "✗", "green" if well else "bold red", "engine", f"{url}{'' if well else f': {state}'}")
        )
    if len(health.router.engines) > MAX_ITEMS:
        bad = sum(state != "ok" for state in list(health.router.engines.values())[MAX_ITEMS:])
        left = len(health.router.engines) - MAX_ITEMS
        lines.append(("✗" if bad else "✓", "bold red" if bad else "green", "engines", f"{left} more, {bad} failing"))
    return [*lines, *_traffic(health.traffic)]


def _state(router: RouterHealth) -> tuple[str, str, str]:
    at = router.address.removeprefix("http://")
    if router.state == "ready":
        return ("✓", "green", f"ready at {at}") if not router.trouble else ("✗", "bold red", f"{at}: {router.trouble}")
    if router.state == "not ready":
        return "✗", "bold red", f"{at} answers, but no engine does{f'; {router.trouble}' if router.trouble else ''}"
    if router.state == "unknown":
        return "·", "dim", "unknown: serving.port is not a fixed port"
    if router.expected:
        return "✗", "bold red", f"not running at {at}: {router.trouble}"
    return "·", "dim", f"not running at {at} (traced serve starts it)"


def _traffic(traffic: Traffic) -> list[tuple[str, str, str, str]]:
    if not traffic.day and not traffic.unsettled:
        return [("·", "dim", "traffic", "no conversation in 24 h")]
    ranked = sorted(traffic.day.items(), key=lambda item: -item[1])
    models = ", ".join(f"{name} {count}" for name, count in ranked[:MAX_ITEMS])
    rest = f", {len(ranked) - MAX_ITEMS} more" if len(ranked) > MAX_ITEMS else ""
    total = sum(traffic.day.values())
    lines = [("✓", "green", "traffic", f"{total}{'+' * traffic.partial} conversations in 24 h: {models}{rest}")]
    troubles = [f"{count}× {status}" for status, count in list(traffic.failures.items())[:MAX_ITEMS]]
    waiting = f"{traffic.unsettled} exchanges of open conversations" if traffic.unsettled else ""
    default = f"{sum(traffic.by_default.values())} to base by default" if traffic.by_default else ""
    details = ", ".join(filter(None, [", ".join(troubles), waiting, default]))
    if details:
        lines.append(("!", "yellow", "failed", details) if troubles else ("·", "dim", "waiting", details))
    return lines


def _parts(readiness: Readiness | None) -> list[tuple[str, str, str, str]]:
    if readiness is None:
        return [("·", "dim", "parts", "…")]
    if not readiness.dead:
        return [("✓", "green", "parts", "store, disk, Docker and the service are ready")]
    return [("✗", "bold red", name, reason) for name, reason in list(readiness.dead.items())[:MAX_ITEMS]]
