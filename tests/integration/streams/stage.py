"""A stage as a process of its own: `stage.py URL RUN FROM TO FANOUT`. Forwards each entry as FANOUT entries, for ever.

The data of an output is the input's with its index, as a sample's id is its group's. Says `working` at its first entry.
"""

from __future__ import annotations

import asyncio
import sys

from trireme.streams import RedisStreams
from trireme.streams.lease import held

WORK_S = 0.02
LEASE_S = 0.5


async def main(url: str, run: str, source: str, target: str, fanout: int) -> None:
    async with RedisStreams(url, run, lease_s=LEASE_S, max_deliveries=20) as streams:
        stream, to = getattr(streams, source), getattr(streams, target)
        while True:
            entries = await stream.take(4, block_s=1)
            if entries:
                print("working", flush=True)
            async with held(stream, entries):
                for entry in entries:
                    await asyncio.sleep(WORK_S)
                    await stream.forward(entry, to, [entry.data + b"/%d" % index for index in range(fanout)])


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:5], int(sys.argv[5])))  # type: ignore[arg-type]
