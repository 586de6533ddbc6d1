#!/bin/sh
# install.sh VARIANT LOCK EXTRA: what one image needs, and the user that it runs as.
# cpu: the lock, as `make setup` does. gpu: the extra, resolved anew, on top of what the base image brings.
set -eu
variant=$1 lock=$2 extra=$3
case $variant in
  cpu) bash scripts/install.sh python3 "requirements/$lock.lock" ;;
  gpu) python3 -m pip install -q --no-cache-dir --root-user-action=ignore ".[$extra]" && rm -rf build ;;
  *) echo "VARIANT is cpu or gpu, not '$variant'" >&2; exit 1 ;;
esac
useradd --uid 10001 --create-home trireme
# New volumes take their owner from these folders.
install -d -o trireme -g trireme /models /runs
