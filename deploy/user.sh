#!/bin/sh
# The user that a service runs as, and the folders that it finds its volumes at: new volumes take their owner.
set -eu
useradd --uid 10001 --create-home trireme
install -d -o trireme -g trireme /models /runs
