#!/bin/sh
# The password goes in by standard input: arguments show in every list of processes.
set -eu
: "${REDIS_PASSWORD:?is empty: run deploy/secrets.sh}"
exec redis-server /etc/trireme/redis.conf - <<CONFIG
requirepass $REDIS_PASSWORD
CONFIG
