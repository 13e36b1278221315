#!/usr/bin/env bash
# Makes .venv with every package of constraints.txt, each file checked against its hash. Changes nothing outside this
# folder but pip's cache. Run it again at any time: where nothing changed it returns at once.
#
#     ./setup.sh             the project, its tests and checks
#     ./setup.sh --extras    besides: DeepSpeed, the Optuna sweeper and the job launchers
#
# Read where they are set:
#     PYTHON=/path/to/python3.12    the interpreter (3.11 or newer; 3.11 is the tested one)
#     TORCH=cpu or TORCH=cuda       which build of torch (default: CUDA where nvidia-smi finds a GPU, else the CPU build
#                                   where pip's sources hold it, else PyPI's, which on Linux is the CUDA build)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

die() { printf 'setup.sh: %s\n' "$@" >&2; exit 1; }

case "${1:-}" in
    '') extras=$([ -e .venv/extras ] && echo yes || echo no) ;;  # a plain call keeps what --extras once added
    --extras) extras=yes ;;
    *) die "unknown argument '$1': the only one is --extras" ;;
esac
torch=${TORCH:-$(cat .venv/torch 2>/dev/null || echo auto)}
case "$torch" in auto | cpu | cuda) ;; *) die "TORCH=$torch: it is cpu or cuda" ;; esac
stamp="$(cat setup.sh pyproject.toml constraints*.txt | cksum) $extras $torch $PWD"
if [ "$(cat .venv/stamp 2>/dev/null)" = "$stamp" ]; then exit 0; fi

find_python() {
    local candidates=${PYTHON:-python3.11 python3 python3.12 python3.13 python3.14} candidate
    for candidate in $candidates; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    die "no Python 3.11 or newer found (tried: $candidates)." \
        "Install one (Debian: apt-get install python3 python3-venv) or name it: PYTHON=/path/to/python3.11 ./setup.sh"
}

make_venv() {
    local python made
    made=$(cat .venv/made 2>/dev/null || true)
    python=$(if [ -z "${PYTHON:-}" ] && [ "${made% *}" = "$PWD" ]; then echo "${made##* }"; else find_python; fi)
    if [ "$made" = "$PWD $python" ] && .venv/bin/python -m pip --version >/dev/null 2>&1; then return; fi
    [ -x "$python" ] || python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$python cannot make virtual environments (Debian: apt-get install python3-venv)"
    echo "Making .venv with $("$python" --version), $python"
    "$python" -m venv --clear .venv
    echo "$PWD $python" > .venv/made
    torch=${TORCH:-auto}  # what an earlier .venv held no longer counts
}

# --no-deps: the files list everything, so there is nothing to resolve. `pip check` at the end proves it.
install() { .venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps --require-hashes "$@"; }

# The named packages' blocks of constraints.txt, hashes included.
pinned() {
    awk -v names=" $* " '/^[a-z0-9]/ { split($1, part, "=="); on = index(names, " " part[1] " ") } on' constraints.txt
}

# Leaves the build in .venv/torch. pip takes torch as satisfied afterwards, whichever build it is.
install_torch() {
    local build=$torch
    if [ "$build" = auto ] && [ "$(uname)" = Linux ] && nvidia-smi -L >/dev/null 2>&1; then build=cuda; fi
    if [ "$build" != cuda ]; then
        if install -r <(pinned torch) 2>.venv/torch.log; then echo cpu > .venv/torch; return; fi
        if [ "$build" = cpu ] || [ "$(uname)" != Linux ]; then
            cat .venv/torch.log >&2
            die "pip's sources hold no build of torch that constraints.txt lists for this machine"
        fi
        echo "pip's sources hold no CPU build of torch that constraints.txt lists. PyPI's works too, but is built for CUDA:"
        echo "about 4 GB with its libraries. To avoid that, stop here, and see 'Setting up' in CONTRIBUTING.md."
    fi
    install -r constraints-cuda.txt
    echo cuda > .venv/torch
}

make_venv
if [ -e .venv/torch ] && [ "$(cat .venv/torch)" != "$torch" ]; then
    die "TORCH=$torch, but .venv holds the $(cat .venv/torch) build: remove .venv first"
fi
rm -f .venv/stamp
echo "Installing $(grep -c '==' constraints.txt) pinned packages into .venv: a few minutes the first time, less once pip has cached them"
# The installer and the build backend come first: packages that exist only as source are built with these, not with
# whatever version an isolated build would fetch.
install -r <(pinned pip setuptools)
install_torch
install --no-build-isolation -r constraints.txt
if [ "$extras" = yes ]; then
    install --no-build-isolation -r constraints-extras.txt
    touch .venv/extras
fi
# setuptools warns that a folder beside setup may shadow the package; here it is the package.
PYTHONWARNINGS=ignore .venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable .
.venv/bin/python -m pip check
torch=$(cat .venv/torch)
echo "$(cat setup.sh pyproject.toml constraints*.txt | cksum) $extras $torch $PWD" > .venv/stamp
echo "Ready: .venv/bin/python run.py"
