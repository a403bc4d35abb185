"""Check a cycle's model before it begins, as a job: ``python -m traced.pipeline.preflight_worker JOB.json``.

The job's arguments are ``data_dir`` and ``overrides`` (the settings that the cycle would store, dotted). It ends with
the ``ConfigError`` of the first failed check, or with an empty value.
"""

import sys
from pathlib import Path
from typing import Any

from traced.processes.child import Reporter, run_child


def work(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, object]:
    """Make the checks that load the model."""
    # Imported here, after the first heartbeat: on a busy machine these imports take seconds.
    from traced.config.settings import load_settings
    from traced.core.checks import raise_first
    from traced.pipeline.preflight import model_checks

    raise_first(model_checks(load_settings(Path(arguments["data_dir"]), arguments["overrides"])))
    return {}


if __name__ == "__main__":
    sys.exit(run_child(work))
