"""Stand-in for the reward service."""

import asyncio
import sys

from services.fake import arguments, run

config, name = arguments("reward")
sys.exit(asyncio.run(run("reward", [], config, name, None)))
