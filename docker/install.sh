#!/usr/bin/env bash
# Install one locked environment: docker/install.sh airflow|engine [DIRECTORY]
#
# `make setup` and both images use this one path. It builds from nothing whenever its stamp is missing or differs, so an
# interrupted build is repaired by running it again. pip does the work, not uv, so that pip's own configuration (a local
# wheel directory, a mirror, a constraint) is honoured; the locks are complete, so pip resolves nothing.
#
# EAGLE3_ENGINE=cpu|gpu overrides what nvidia-smi says, for an image built on a machine without the GPU it will run on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name=$1
dir=${2:-.venvs/$name}
case $name in
airflow) locks=(requirements-airflow.txt) ;;
engine)
    if nvidia-smi -L >/dev/null 2>&1; then device=gpu; else device=cpu; fi
    if [ "${EAGLE3_ENGINE:-$device}" = gpu ]; then
        locks=(requirements-engine-gpu.txt)
    else
        locks=(requirements-engine-cpu.txt requirements-torch-cpu.txt requirements-torch-cuda.txt)
    fi
    ;;
*) echo "setup: expected airflow or engine, found '$name'" >&2 && exit 2 ;;
esac

log=$dir.log
mkdir -p "$(dirname "$dir")"
# Two set-ups at once would build into one directory.
exec 9>"$dir.lock"
flock 9

say() { echo "setup: $name: $*"; }
fail() {
    echo "setup: $name: $1" >&2
    [ ! -s "$log" ] || grep -v '^WARNING' "$log" | tail -n 5 >&2
    exit 1
}

# The directory is part of the stamp because the scripts of an environment hold its absolute path.
lock_stamp=$({ cat "${locks[@]}" && realpath "$dir"; } | sha256sum)
project_stamp=$(sha256sum <pyproject.toml)

find_python() {
    local python
    for python in ${PYTHON:-python3 python3.12 python3.11}; do
        if "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then
            echo "$python" && return
        fi
    done
    fail "expected Python 3.11 or 3.12 as python3, found $({ "${PYTHON:-python3}" --version || echo none; } 2>/dev/null); install one or say make PYTHON=..."
}

# Usage: pip_install COUNT LABEL ARGUMENTS...; prints a line every forty packages, because the downloads take minutes.
pip_install() {
    local count=$1 label=$2
    shift 2
    "$dir/bin/python" -m pip install --no-input --disable-pip-version-check --progress-bar off --no-deps --no-compile "$@" \
        2>>"$log" | tee -a "$log" | awk -v n="$count" -v label="setup: $name: $label" '
            /^ *Collecting /          { if (++c % 40 == 0) { print label ": " c " of " n " fetched"; fflush() } }
            /^Installing collected /  { if (n > 1) { print label ": installing"; fflush() } }'
}

install_lock() { pip_install "$(grep -c '^[a-z]' "$1")" "$1" --require-hashes --only-binary :all: -r "$1"; }

build() {
    local python start=$SECONDS
    python=$(find_python)
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "expected the venv module in $python, found none; on Debian or Ubuntu: apt-get install python3-venv"
    rm -rf "$dir"
    : >"$log"
    say "building $dir with $("$python" --version) from ${locks[0]}"
    "$python" -m venv "$dir" >>"$log" 2>&1 || fail "could not create $dir"
    awk '/^[a-z]/ { wanted = /^pip==/ } wanted' "${locks[0]}" >"$dir/pip.txt"
    install_lock "$dir/pip.txt" || fail "pip could not renew itself; the whole output is in $log"
    install_lock "${locks[0]}" || fail "pip could not install ${locks[0]}; the whole output is in $log"
    if [ "${locks[1]:-}" ] && ! install_lock "${locks[1]}"; then
        say "pip sees no CPU build of torch, so the CUDA build comes with its libraries (3 GB; ${locks[1]} says more)"
        install_lock "${locks[2]}" || fail "pip could not install ${locks[2]}; the whole output is in $log"
    fi
    # Airflow starts many short processes from a tenth of the files; a stage imports a few of seven million lines, and
    # Python compiles those at the first import.
    if [ "$name" = airflow ]; then
        say "compiling"
        "$dir/bin/python" -m compileall -q -j 0 "$dir/lib" >>"$log" 2>&1 || true
    fi
    echo "$lock_stamp" >"$dir/.lock-stamp"
    say "built in $((SECONDS - start)) s"
}

if [ "$(cat "$dir/.lock-stamp" 2>/dev/null)" != "$lock_stamp" ] || ! "$dir/bin/python" -c '' 2>/dev/null; then
    build
fi
if [ "$(cat "$dir/.project-stamp" 2>/dev/null)" != "$project_stamp" ]; then
    pip_install 1 "this project" --no-build-isolation --editable . ||
        fail "pip could not install this project; the whole output is in $log"
    echo "$project_stamp" >"$dir/.project-stamp"
fi
