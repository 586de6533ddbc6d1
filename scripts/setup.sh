#!/usr/bin/env bash
# setup.sh [VENV [LOCK]]: makes the CPU environment of a checkout. A second call is instant.
# On a machine with GPUs install the extras instead: docs/deployment.md.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv} lock=${2:-requirements/cpu.lock}
log=$venv/setup.log

# What this environment depends on, its folder included: a moved virtual environment does not work.
stamp=$(cat "$lock" pyproject.toml scripts/setup.sh scripts/install.sh <(pwd) | sha256sum | cut -d' ' -f1)
[[ -f $venv/.ready && $(<"$venv/.ready") == "$stamp" ]] && exit 0

find_python() {  # prints a Python that the locked packages fit
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3 python3.12 python3.13; do
    [[ -n $candidate ]] || continue
    # A shim may exist for a version that is not there, and Debian's python3 may lack venv: try it, not only its name.
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null
    then command -v "$candidate"; return; fi
  done
  echo 'No fitting Python was found: 3.11 (or 3.12, 3.13) with the venv module is needed.' >&2
  echo 'Install one (Debian: python3 and python3-venv), or name it: make setup PYTHON=/path/to/python3.11' >&2
  return 1
}

step() {  # step WHAT COMMAND...: shows the command's words only if it fails
  local what=$1 start=$SECONDS; shift
  printf '%s … ' "$what"
  if "$@" >>"$log" 2>&1; then printf '%ss\n' "$((SECONDS - start))"; return; fi
  printf 'failed:\n'; tail -n 30 "$log" >&2
  printf '\nSet-up failed; the whole log is %s\n' "$log" >&2; exit 1
}

python=$(find_python)
if ! "$venv/bin/python" -c '' 2>/dev/null; then rm -rf "$venv"; "$python" -m venv "$venv"; fi
rm -f "$venv/.ready"
: >"$log"
step "Installing $(grep -c == "$lock") pinned packages into $venv" scripts/install.sh "$venv/bin/python" "$lock"
if ! grep -q '^trl==' "$lock"; then
  step 'Installing trireme' "$venv/bin/python" -m pip install -q --no-deps --no-build-isolation -e .
fi
echo "$stamp" >"$venv/.ready"
