#!/usr/bin/env bash
# Makes .venv with Python 3.11 and everything that training and tests on a CPU need, as pinned in requirements-cpu.txt.
# Called by quickstart.sh and test.sh; a second call finds its stamp and returns at once:
#     bash scripts/setup_env.sh && . .venv/bin/activate
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly PINS=scripts/requirements-cpu.txt
readonly VENV=.venv
# A stamp is written when its part is complete, and holds what the part was made from.
readonly PACKAGES_STAMP=$VENV/.megascale-packages
readonly PROJECT_STAMP=$VENV/.megascale-project
readonly UNFINISHED=$VENV/.megascale-unfinished  # there while packages are installed: what was interrupted is started over
readonly LOG=$VENV/megascale-setup.log
readonly STEP_TIMEOUT_SECONDS=1800
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { printf '[setup %3d s] %s\n' "$SECONDS" "$*"; }

fail() {
    printf '[setup] error: %s\n' "$*" >&2
    exit 1
}

packages_fingerprint() { { cat "$PINS" && pwd -P; } | sha256sum | cut -d' ' -f1; }
project_fingerprint() { { cat setup.cfg pyproject.toml && packages_fingerprint; } | sha256sum | cut -d' ' -f1; }

# stamped STAMP FINGERPRINT
stamped() { [[ -x $VENV/bin/python && -f $1 && $(<"$1") == "$2" ]]; }

# stamp STAMP FINGERPRINT: there as a whole or not at all.
stamp() { printf '%s\n' "$2" >"$1.new" && mv "$1.new" "$1"; }

is_python_311() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1; }

# Prints a command that starts Python 3.11.
find_python() {
    local candidate
    for candidate in python3.11 python3 python; do
        if is_python_311 "$candidate"; then
            printf '%s' "$candidate"
            return
        fi
    done
    fail "no Python 3.11 found: the pinned megatron-core needs it. Install python3.11 with its venv module and put it on PATH."
}

# step WHAT COMMAND...: runs the command quietly, with a sign of life every 15 s; its output is shown only if it fails.
step() {
    local what=$1 child
    shift
    say "$what"
    timeout "$STEP_TIMEOUT_SECONDS" "$@" >>"$LOG" 2>&1 &
    child=$!
    # Children in the background ignore Ctrl-C by themselves.
    trap 'kill '"$child"' 2>/dev/null; exit 130' INT TERM
    while ! timeout 15 tail --pid="$child" -f /dev/null; do
        say "  still $what"
    done
    trap - INT TERM
    if ! wait "$child"; then
        rm -f "$UNFINISHED"  # unlike an interruption: pip undoes what it cannot finish
        tail -n 12 "$LOG" >&2
        fail "$what failed; the whole output is in $LOG"
    fi
}

discard_unusable_venv() {
    if [[ -f $UNFINISHED ]]; then
        say "the last install was interrupted: starting over"
        rm -rf "$VENV"
    elif [[ -f $VENV/bin/activate ]] && ! grep -qF "$(pwd -P)/$VENV" "$VENV/bin/activate"; then
        say "$VENV was made for another folder: starting over"
        rm -rf "$VENV"
    elif [[ -e $VENV/bin/python ]] && ! is_python_311 "$VENV/bin/python"; then
        fail "$VENV does not hold a working Python 3.11. Remove it ('rm -rf $VENV') and try again."
    fi
}

make_venv() {
    local python
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 && return
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments: install its venv module (on Debian: python3.11-venv)."
    rm -rf "$VENV"
    mkdir "$VENV"
    touch "$UNFINISHED"
    step "making $VENV with $("$python" --version)" "$python" -m venv "$VENV"
}

install_packages() {
    local torch
    touch "$UNFINISHED"
    rm -f "$PACKAGES_STAMP" "$PROJECT_STAMP"
    torch=$(grep -E '^torch==' "$PINS")
    step "installing $torch" "$VENV/bin/python" -m pip install "$torch"
    step "installing $(grep -cE '^[a-zA-Z0-9]' "$PINS") pinned packages" "$VENV/bin/python" -m pip install -r "$PINS"
    step "checking that the versions fit each other" "$VENV/bin/python" -m pip check
    stamp "$PACKAGES_STAMP" "$(packages_fingerprint)"
    rm -f "$UNFINISHED"
}

install_project() {
    rm -f "$PROJECT_STAMP"
    step "installing this project (editable)" "$VENV/bin/python" -m pip install --no-deps --no-build-isolation -e .
    stamp "$PROJECT_STAMP" "$(project_fingerprint)"
}

main() {
    stamped "$PROJECT_STAMP" "$(project_fingerprint)" && return
    # Two calls at once: the second waits, and then finds the work done.
    if [[ -z ${MEGASCALE_SETUP_LOCKED:-} ]] && command -v flock >/dev/null; then
        flock --nonblock .venv.lock true || say "waiting for another setup to finish"
        MEGASCALE_SETUP_LOCKED=1 flock --timeout "$STEP_TIMEOUT_SECONDS" --conflict-exit-code 75 \
            .venv.lock bash scripts/setup_env.sh && return
        (($? != 75)) || fail "another setup has held .venv.lock for $STEP_TIMEOUT_SECONDS s"
        exit 1
    fi
    discard_unusable_venv
    make_venv
    stamped "$PACKAGES_STAMP" "$(packages_fingerprint)" || install_packages
    install_project
    say "the environment is ready in $VENV"
}

main
