"""The machine for the overview: devices as table rows; router, engines and parts as lines of symbol, name and state."""

from rich.text import Text

from traced.client.models import DeviceView, Readiness
from traced.client.serving import Health, RouterHealth, Traffic
from tui.text import cell, sanitize_line
from tui.widgets.tables import Row

GIB = 2**30
BAR, STEPS, EMPTY = 5, " ▏▎▍▌▋▊▉█", "░"
SHOWN = 3  # of models, engines and reasons; the rest is counted


def device_rows(devices: list[DeviceView]) -> list[Row]:
    """What each does and who holds it."""
    return [Row(one.id, _device(one)) for one in devices]


def _device(one: DeviceView) -> list[Text]:
    name = f"{one.name} {one.id.removeprefix('GPU-')[:8]}"
    if one.kind == one.id:  # of the processors' use, what others take is told: the service's own work is no obstacle
        name = f"{one.kind}, {one.name.rpartition(', ')[2]}: others"
    memory = f"{one.memory_used / GIB:.0f}/{one.memory_total / GIB:.0f} GiB"
    if one.lease is not None:
        wanted = f", wanted by {one.lease.wanted_by}" if one.lease.wanted_by else ""
        held = cell(f"▶ {one.lease.purpose}{wanted}", "bold cyan", 80)
    elif one.idle:
        held = cell("✓ free", "green")
    else:
        held = cell(f"· {'; '.join(one.why_not)}", "dim", 120)
    return [cell(name, limit=32), _use(one.utilisation), cell(f"{memory:>10}"), held]


def _use(share: float | None) -> Text:
    if share is None:
        return Text(f"{'?':>5} {EMPTY * BAR}", "dim")
    eighths = min(max(round(share * BAR * 8), 0), BAR * 8)
    full = "█" * (eighths // 8) + (STEPS[eighths % 8] if eighths % 8 else "")
    return Text(f"{100 * share:3.0f} % ").append(full, "cyan").append(EMPTY * (BAR - len(full)), "dim")


def health_lines(health: Health | None, readiness: Readiness | None, width: int) -> Text:
    """The router, its traffic and the parts of the service."""
    told = Text(no_wrap=True, overflow="ellipsis")
    for mark, style, name, text in [*_router(health), *_parts(readiness)]:
        told.append(f"{mark} ", style).append(f"{name:<9}", "bold").append(
            sanitize_line(text, width * 2), style * (mark == "✗")
        )
        told.append("\n")
    told.right_crop(1)
    return told


def _router(health: Health | None) -> list[tuple[str, str, str, str]]:
    if health is None:
        return [("·", "dim", "router", "…")]
    mark, style, text = _state(health.router)
    found = [(mark, style, "router", text)]
    for url, state in list(health.router.engines.items())[:SHOWN]:
        well = state == "ok"
        found.append(
            ("✓" if well else "✗", "green" if well else "bold red", "engine", f"{url}{'' if well else f': {state}'}")
        )
    if len(health.router.engines) > SHOWN:
        bad = sum(state != "ok" for state in list(health.router.engines.values())[SHOWN:])
        left = len(health.router.engines) - SHOWN
        found.append(
            ("✗" if bad else "✓", "bold red" if bad else "green", "engines", f"{left} more, {bad} with trouble")
        )
    return [*found, *_traffic(health.traffic)]


def _state(router: RouterHealth) -> tuple[str, str, str]:
    at = router.address.removeprefix("http://")
    if router.state == "ready":
        return ("✓", "green", f"ready at {at}") if not router.trouble else ("✗", "bold red", f"{at}: {router.trouble}")
    if router.state == "not ready":
        return "✗", "bold red", f"{at} answers, and no engine does{f'; {router.trouble}' if router.trouble else ''}"
    if router.state == "unknown":
        return "·", "dim", "not asked: its port is not fixed (serving.port)"
    if router.expected:
        return "✗", "bold red", f"away from {at}: {router.trouble}"
    return "·", "dim", f"none at {at} (traced serve)"


def _traffic(traffic: Traffic) -> list[tuple[str, str, str, str]]:
    if not traffic.day and not traffic.unsettled:
        return [("·", "dim", "traffic", "no conversation in 24 h")]
    most = sorted(traffic.day.items(), key=lambda one: -one[1])
    models = ", ".join(f"{name} {count}" for name, count in most[:SHOWN])
    more = f", {len(most) - SHOWN} more" if len(most) > SHOWN else ""
    whole = sum(traffic.day.values())
    found = [("✓", "green", "traffic", f"{whole}{'+' * traffic.partial} conversations in 24 h: {models}{more}")]
    troubles = [f"{count}× {status}" for status, count in list(traffic.failures.items())[:SHOWN]]
    waiting = f"{traffic.unsettled} not settled yet" if traffic.unsettled else ""
    default = f"{sum(traffic.by_default.values())} to base by default" if traffic.by_default else ""
    told = ", ".join(filter(None, [", ".join(troubles), waiting, default]))
    if told:
        found.append(("!", "yellow", "failed", told) if troubles else ("·", "dim", "waiting", told))
    return found


def _parts(readiness: Readiness | None) -> list[tuple[str, str, str, str]]:
    if readiness is None:
        return [("·", "dim", "parts", "…")]
    if not readiness.dead:
        return [("✓", "green", "parts", "store, disk, Docker and the service can work")]
    return [("✗", "bold red", name, why) for name, why in list(readiness.dead.items())[:SHOWN]]
