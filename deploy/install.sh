#!/bin/sh
# install.sh VARIANT LOCK EXTRA: makes /opt/venv with what one service needs, in a build stage that is thrown away.
# cpu: the lock, as `make setup` does. gpu: the extra, resolved anew, on top of what the base image brings.
set -eu
variant=$1 lock=$2 extra=$3

compiler() {  # some requirements have no wheels
  apt-get update -q
  apt-get install -qy --no-install-recommends gcc g++ libc6-dev
  header=$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
  [ -f "$header" ] || apt-get install -qy --no-install-recommends python3-dev
}

compiler >/dev/null
case $variant in
  cpu)
    python3 -m venv /opt/venv
    bash scripts/install.sh /opt/venv/bin/python "requirements/$lock.lock" ;;
  gpu)
    touch README.md  # pyproject.toml names it; a copy of it would rebuild everything whenever the text changes
    python3 -m venv --system-site-packages --without-pip /opt/venv
    /opt/venv/bin/python -m pip install -q --no-cache-dir ".[$extra]" ;;
  *) echo "VARIANT is cpu or gpu, not '$variant'" >&2; exit 1 ;;
esac
