"""``python -m traced.inference.vllm_child FLAGS``: vLLM's server as a child that ends with its parent.

It runs vLLM's own entry point with this process's arguments. The Python that runs it has vLLM, and of traced only what
this module imports.
"""

import runpy
import sys

from traced.processes.parent import follow_parent

SERVER = "vllm.entrypoints.openai.api_server"
GRACE_S = 15.0


def main() -> None:
    """Run the server."""
    follow_parent(grace_s=GRACE_S)
    sys.argv[0] = SERVER
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
