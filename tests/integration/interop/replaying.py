"""OpenEnv's own runtime validation of a package whose server runs already: ``python replaying.py FOLDER URL``.

Run by the Python that has openenv. Its provider builds no image (that needs a registry); everything else is OpenEnv's:
the plan is read and replayed, the graders judge. Prints as JSON each check's status and evidence, and what OpenEnv
misses in the folder to publish it and to serve it in other ways.
"""

import json
import sys
from pathlib import Path

from openenv.cli._cli_utils import validate_env_structure
from openenv.cli._validation import validate_multi_mode_deployment
from openenv.validation.runner import run_validation
from openenv.validation.types import Level, ProviderCapability


class Running:
    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    def inspect(self) -> dict[str, object]:
        return {}

    def stop(self) -> None:
        pass


class Provider:
    name = "running"
    capabilities = frozenset({ProviderCapability.IMAGE_BUILD})
    supported_network_modes = frozenset({"public"})

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    def build(self, root: Path, execution: object) -> str:
        return "sha256:" + "0" * 64

    def start(self, spec: object) -> Running:
        return Running(self.base_url)


folder = Path(sys.argv[1])
result = run_validation(folder, max_level=Level.RUNTIME, provider=Provider(sys.argv[2]))
report = {
    "checks": {check.check_id: [check.status.value, *check.evidence] for check in result.results},
    "to publish": validate_env_structure(folder),
    "to serve": validate_multi_mode_deployment(folder)[1],
}
print(json.dumps(report))
