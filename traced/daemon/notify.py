"""sd_notify(3) messages and watchdog pings to the service manager.

Invariants: pings are sent only by ``beat``, which the cycle loop calls once per iteration, so a stuck loop is
restarted; at most four pings per watchdog interval. Without a service manager every call does nothing.
How it fails: never; an undeliverable message is dropped and the call returns False.

The package sdnotify (0.3.2) would send the datagram only, and it drops a status that is not Latin-1.
"""

import os
import socket
import time
from collections.abc import Callable, MutableMapping

PINGS_PER_INTERVAL = 4


class ServiceManager:
    """The service manager behind NOTIFY_SOCKET; ``watchdog_s`` is the watchdog interval, None without a watchdog."""

    def __init__(
        self, address: str, watchdog_s: float | None = None, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.address = address
        self.watchdog_s = watchdog_s
        self._monotonic = monotonic
        self._next_ping = monotonic()

    def ready(self, status: str = "") -> bool:
        """Report that start-up or a reload is complete."""
        return self._send("READY=1", status)

    def reloading(self, status: str = "") -> bool:
        """Report that a reload begins; ``ready`` reports its end. Type=notify-reload requires MONOTONIC_USEC."""
        return self._send(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}", status)

    def stopping(self, status: str = "") -> bool:
        """Report that the daemon has begun to stop."""
        return self._send("STOPPING=1", status)

    def status(self, text: str) -> bool:
        """Set the status line that ``systemctl status`` shows."""
        return self._send("", text)

    def beat(self) -> bool:
        """Send a watchdog ping if one is due; return whether it was sent. Called once per iteration of the loop."""
        if self.watchdog_s is None or self._monotonic() < self._next_ping:
            return False
        self._next_ping = self._monotonic() + self.watchdog_s / PINGS_PER_INTERVAL
        return self._send("WATCHDOG=1", "")

    def extend(self, seconds: float) -> bool:
        """Extend the time limit to start or stop by ``seconds`` (EXTEND_TIMEOUT_USEC), for a migration or a drain."""
        return self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}", "")

    def _send(self, message: str, status: str) -> bool:
        line = f"STATUS={' '.join(status.split())}" if status else ""
        return bool(self.address) and _send(self.address, "\n".join(part for part in (message, line) if part))


def service_manager(
    environment: MutableMapping[str, str] = os.environ, *, monotonic: Callable[[], float] = time.monotonic
) -> ServiceManager:
    """Return the service manager of this process and remove NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID.

    As in sd_watchdog_enabled(3), pings are expected if WATCHDOG_USEC is a positive number and WATCHDOG_PID is absent or
    this process.
    """
    # Removed from the environment, so that children do not notify in the name of the daemon.
    address = environment.pop("NOTIFY_SOCKET", "")
    interval, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
    mine = pid in ("", str(os.getpid()))
    watchdog_s = int(interval) / 1e6 if interval.isdecimal() and int(interval) > 0 and mine else None
    return ServiceManager(address if address[:1] in ("/", "@") else "", watchdog_s, monotonic=monotonic)


def _send(address: str, message: str) -> bool:
    name = f"\0{address[1:]}" if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        # The daemon must not wait because the receiver's queue is full.
        channel.setblocking(False)
        try:
            channel.sendto(message.encode(), name)
        except OSError:
            return False
    return True
