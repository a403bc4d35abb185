"""``python -m traced.inference.vllm_child FLAGS``: run vLLM's server as a child process that ends with its parent.

The module runs vLLM's own entry point with the arguments of this process. The Python interpreter that runs it has vLLM
but may lack traced's dependencies, so the module imports only code of traced that needs nothing but the standard
library.
"""

import runpy
import sys

from traced.core.permissions import private_umask
from traced.processes.parent import follow_parent

SERVER = "vllm.entrypoints.openai.api_server"
GRACE_S = 15.0


def main() -> None:
    """Run vLLM's server until it is stopped or the parent process ends."""
    private_umask()
    follow_parent(grace_s=GRACE_S)
    sys.argv[0] = SERVER
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
