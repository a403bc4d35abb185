"""A station of a service's cycle on the engine at ``$OBEDIENT_URL`` (``tests.obedient_agent``)."""

import os
import sys

from tests.obedient_agent import at_work
from traced.executor.child import run_child
from traced.service.station import work

if __name__ == "__main__":
    with at_work(os.environ["OBEDIENT_URL"]):
        sys.exit(run_child(work))
