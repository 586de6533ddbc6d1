"""Stand-in for the rollout service."""

import asyncio
import sys

from services.fake import arguments, run

config, name = arguments("rollout")
sys.exit(asyncio.run(run("rollout", [], config, name, None)))
