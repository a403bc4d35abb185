"""A stage of a service's cycle on the engine at ``$OBEDIENT_URL`` (``tests.obedient_agent``)."""

import os
import sys

from tests.obedient_agent import at_work
from traced.pipeline.stage_worker import work
from traced.processes.child import run_child

if __name__ == "__main__":
    with at_work(os.environ["OBEDIENT_URL"]):
        sys.exit(run_child(work))
