"""No network but loopback: an audit hook raises on any connection or name look-up beyond it.

tests/conftest.py installs it in the tests' own process; in the commands that acceptance tests start, and in the Pythons
that these start, Python does, because its folder is on PYTHONPATH. What is called is written into the file that
STRAY_CALLS names, so that it fails the test however the command takes it. Not covered: what is no Python.
"""

import os
import sys

LOCAL_NAMES = {"", "localhost", "127.0.0.1", "::1", "0.0.0.0", "::"}
NOTED_IN = "STRAY_CALLS"


class NetworkForbidden(RuntimeError):
    """A test reached for the network."""


def is_loopback(host: object) -> bool:
    """Whether ``host`` (a name or an address) is this machine."""
    if host is None:
        return True
    name = _text(host)
    if name in LOCAL_NAMES:
        return True
    import ipaddress

    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        return False


def forbid_network(event: str, arguments: "tuple[object, ...]") -> None:
    if event == "socket.connect":
        address = arguments[1]
        if isinstance(address, tuple) and not is_loopback(address[0]):
            raise _recorded_error(f"a test connected to {address!r}; tests speak to loopback only")
    elif event == "socket.getaddrinfo" and not is_loopback(arguments[0]):
        raise _recorded_error(f"a test looked up {_text(arguments[0])!r}; tests speak to loopback only")


def _text(host: object) -> str:
    return host.decode() if isinstance(host, bytes) else str(host)


def _recorded_error(message: str) -> NetworkForbidden:
    if path := os.environ.get(NOTED_IN):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{message}\n")
    return NetworkForbidden(message)


if __name__ == "sitecustomize":
    sys.addaudithook(forbid_network)
