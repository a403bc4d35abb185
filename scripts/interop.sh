#!/bin/sh
# verifiers and OpenEnv, each in a virtual environment of its own, for the tests of what `traced export` writes and of their targets.
#
#   scripts/interop.sh [DIR]     DIR is .interop unless given: DIR/verifiers and DIR/openenv; two minutes, 1 GB
#
# Two, because they exclude one another: verifiers 0.4.0 pins mcp 2, openenv 0.10.0 needs fastmcp 3, which needs mcp 1.
# setuptools builds the exported packages without a network. Run again after an interruption it goes on; once done it
# does nothing. Needs Python 3.11 or newer ($PYTHON) with venv.
set -eu

VERIFIERS=0.4.0
OPENENV=0.10.0
SETUPTOOLS=84.2.1
dir=${1:-.interop}

install() {
    mark=$dir/.installed-$1-$2
    [ ! -e "$mark" ] || return 0
    echo "interop: installing $1 $2 into $dir/$1"
    [ -x "$dir/$1/bin/python" ] || "${PYTHON:-python3}" -m venv "$dir/$1"
    "$dir/$1/bin/python" -m pip install --quiet --disable-pip-version-check "$1==$2" "setuptools==$SETUPTOOLS"
    : >"$mark"
}

install verifiers "$VERIFIERS"
install openenv "$OPENENV"
