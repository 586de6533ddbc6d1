"""Stand-in for the trainer: counts steps of FAKE_STEP_S seconds, writes its files, drains when asked to.

FAKE_EXIT is its exit code after the last step; FAKE_DATA what it says against the data.
"""

import asyncio
import json
import os
import sys

from services.fake import Settings, arguments, note, run
from trireme.contracts.v1 import trainer_pb2, trainer_pb2_grpc

if "--check-data" in sys.argv:
    sys.stderr.write(os.environ.get("FAKE_DATA", ""))
    sys.exit(2 if "FAKE_DATA" in os.environ else 0)
settings, name = arguments("trainer")


class FakeTrainer(trainer_pb2_grpc.TrainerServiceServicer):
    """A trainer that only counts."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.step = 0
        self.draining = False

    async def GetStatus(self, request, context):
        return trainer_pb2.TrainerStatus(
            run=self.settings.run, step=self.step, max_steps=self.settings.max_steps, phase="training"
        )

    async def Drain(self, request, context):
        self.draining = True
        return trainer_pb2.DrainResponse(step=self.step + 1)

    async def loop(self) -> int:
        directory = self.settings.directory
        while self.step < self.settings.max_steps and not self.draining:
            await asyncio.sleep(float(os.environ.get("FAKE_STEP_S", "0.1")))
            self.step += 1
            row = {"step": self.step, "train/reward": self.step / 10, "train/loss": 0.5, "train/grad_norm": 1.25}
            with (directory / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
        await asyncio.sleep(0.5)
        note(self.settings, f"checkpoint {self.step}")
        (directory / "hf").mkdir(exist_ok=True)
        (directory / "summary.json").write_text(json.dumps({"steps": self.step, "seconds": 1.0}))
        return int(os.environ.get("FAKE_EXIT", "0"))


async def main() -> int:
    trainer = FakeTrainer(settings)
    adder = trainer_pb2_grpc.add_TrainerServiceServicer_to_server
    service = (adder, trainer, "trireme.v1.TrainerService")
    return await run("trainer", [service], settings, name, asyncio.create_task(trainer.loop()))


sys.exit(asyncio.run(main()))
