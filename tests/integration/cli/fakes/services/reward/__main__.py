"""Stand-in for the reward service."""

import asyncio
import sys

from services.fake import arguments, run

settings, name = arguments("reward")
sys.exit(asyncio.run(run("reward", [], settings, name, None)))
