"""``python -m traced.inference.vllm_child --port PORT ...``: run vLLM's server as a supervised child process.

The module runs vLLM's own entry point with the arguments of this process, and ends the process in two cases:

- The parent process ends.
- The server became healthy and then reported that its engine is dead, or refused connections, for ``UNHEALTHY_S``. If
  the engine's process is killed, vLLM stops its server; it waits without limit for requests that only the engine could
  have answered, such as the loading of an adapter (vLLM 0.32.0). The parent restarts a process only after it ended.

The Python interpreter that runs the module has vLLM but may lack traced's dependencies, so it imports only code of
traced that needs nothing but the standard library.
"""

import argparse
import http.client
import os
import runpy
import sys
import threading
import time
from collections.abc import Callable

from traced.core.permissions import private_umask
from traced.processes.parent import follow_parent

SERVER = "vllm.entrypoints.openai.api_server"
GRACE_S = 15.0
UNHEALTHY_S = 20.0
POLL_S = 2.0
# A busy server may answer late, which is no sign of a dead engine.
TIMEOUT_S = 10.0


def main() -> None:
    """Run vLLM's server until it is stopped, the parent process ends or the engine dies."""
    private_umask()
    follow_parent(grace_s=GRACE_S)
    host, port = address(sys.argv[1:])
    threading.Thread(target=end_if_unhealthy, args=(host, port), name="health-watch", daemon=True).start()
    sys.argv[0] = SERVER
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


def address(flags: list[str]) -> tuple[str, int]:
    """Return the host and port of vLLM's flags; of a repeated flag the last value counts, as in vLLM."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    options, _ = parser.parse_known_args(flags)
    return options.host, options.port


def end_if_unhealthy(
    host: str,
    port: int,
    unhealthy_s: float = UNHEALTHY_S,
    poll_s: float = POLL_S,
    end: Callable[[int], None] = os._exit,
) -> None:
    """Wait until the server is healthy, and end this process when it stays unhealthy for ``unhealthy_s`` seconds.

    Args:
        end: Ends the process with an exit code.
    """
    was_healthy, healthy_at = False, time.monotonic()
    while not was_healthy or time.monotonic() - healthy_at < unhealthy_s:
        is_healthy = check_health(host, port)
        if is_healthy is not False:
            was_healthy, healthy_at = was_healthy or bool(is_healthy), time.monotonic()
        time.sleep(poll_s)
    print(
        f"traced: the engine is dead and its server did not end within {unhealthy_s:g} s", file=sys.stderr, flush=True
    )
    end(1)


def check_health(host: str, port: int) -> bool | None:
    """Return whether the server is healthy, or None if it did not answer in time.

    False means that the server reports a dead engine (status 503) or that nothing accepts connections.
    """
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status != http.client.SERVICE_UNAVAILABLE
    except ConnectionRefusedError:
        return False
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


if __name__ == "__main__":
    main()
