# Sourced. find_python: prints a Python that the locked packages fit, or explains what is missing and fails.

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3 python3.12 python3.13; do
    [[ -n $candidate ]] || continue
    # A shim may exist for a version that is not there, and Debian's python3 may lack venv: try it, not only its name.
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  cat >&2 <<'MESSAGE'
No fitting Python was found: 3.11 (or 3.12, 3.13) with the venv module is needed.
Install one (Debian: python3.11 and python3.11-venv) or name it: make setup PYTHON=/path/to/python3.11
MESSAGE
  return 1
}
