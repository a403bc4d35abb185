#!/bin/sh
# vLLM for a machine with an NVIDIA GPU, in a virtual environment of its own: some minutes, about 10 GB.
#
#   scripts/vllm.sh [DIR]     DIR is .vllm by default; for another: engine.vllm_python = "DIR/bin/python"
#
# An environment of its own, because vLLM pins other versions of torch and transformers than training needs. The version
# is the dependency group vllm in pyproject.toml. An interrupted run can be repeated; a finished installation is kept.
# Needs Python 3.11 or newer ($PYTHON) with venv. Not covered: a machine without a GPU (scripts/vllm-cpu.sh).
set -eu

PIP=25.3
root=$(cd "$(dirname "$0")/.." && pwd)
dir=${1:-.vllm}
mark=$dir/.installed-gpu

[ ! -e "$mark" ] || exit 0
echo "vllm: installing into $dir, which takes some minutes"
[ -x "$dir/bin/python" ] || "${PYTHON:-python3}" -m venv "$dir"
"$dir/bin/python" -m pip install --quiet --disable-pip-version-check "pip==$PIP"
"$dir/bin/python" -m pip install --quiet --disable-pip-version-check --group "$root/pyproject.toml:vllm"
"$dir/bin/python" -c 'import vllm'
: >"$mark"
echo "vllm: done. traced serve --set engine.backend=vllm"
