#!/usr/bin/env bash
# Writes .env, from which Compose reads the Redis password, unless it is there. .env is not in version control.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ -f .env ]] && grep -q '^REDIS_PASSWORD=..*' .env && { echo '.env is there already'; exit; }
umask 077
# Letters and digits only: the password also stands in a URL.
printf 'REDIS_PASSWORD=%s\n' "$(head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n')" >>.env
echo 'wrote .env'
