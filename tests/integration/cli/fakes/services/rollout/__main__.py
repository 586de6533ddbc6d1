"""Stand-in for the rollout service."""

import asyncio
import sys

from services.fake import arguments, run

settings, name = arguments("rollout")
sys.exit(asyncio.run(run("rollout", [], settings, name, None)))
