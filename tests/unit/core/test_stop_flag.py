"""Signals in quick succession do not stop a process that waits for a flag."""

import subprocess
import sys

STORM = """
import signal, time
from traced.core.stop_flag import StopFlag

flags = [StopFlag()]
signal.signal(signal.SIGALRM, lambda *arguments: flags[-1].set(*arguments))
signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
end = time.monotonic() + 2
while time.monotonic() < end:
    flags.append(StopFlag())
    while not flags[-1].wait(0.0):
        pass
    del flags[0]
signal.setitimer(signal.ITIMER_REAL, 0)
print("ended")
"""


def test_a_storm_of_signals_sets_it() -> None:
    process = subprocess.run([sys.executable, "-c", STORM], capture_output=True, text=True, check=True, timeout=60)
    assert process.stdout == "ended\n"
