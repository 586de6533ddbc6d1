"""`python -m services.trainer --config FILE [key=value ...]`: one trainer rank; under torchrun, one of several."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from services.trainer.data import SPLITS, DataError, load_dataset
from trireme.config import Config, ConfigError, load_config
from trireme.streams.errors import StreamsError
from trireme.telemetry.logs import setup_logging

log = logging.getLogger("services.trainer")

EXIT_FAILED = 1
EXIT_USAGE = 2


def parse(arguments: Sequence[str]) -> tuple[Config, argparse.Namespace]:
    """The configuration, and what else was given."""
    parser = argparse.ArgumentParser(prog="python -m services.trainer", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the run's YAML file")
    parser.add_argument("--name", default="trainer-0", help="name in the registry and in logs")
    parser.add_argument("--check-data", action="store_true", help="read the prompts of both splits, then end")
    parser.add_argument("overrides", nargs="*", help="key=value, over the file")
    given = parser.parse_args(arguments)
    return load_config(given.config, given.overrides), given


def check(config: Config) -> None:
    """Read the data as training will. Raises DataError naming key, file or row."""
    for split in SPLITS:
        load_dataset(config.data, config.env, split, config.grpo.seed)


def run(config: Config, name: str) -> None:
    """Join the trainer's ranks, load the model, and lead or follow until the run ends."""
    import torch.distributed as dist

    from services.trainer import compose
    from services.trainer.backends.megatron import distributed
    from services.trainer.backends.megatron.backend import MegatronBackend
    from services.trainer.ranks import Channel

    def start() -> tuple[MegatronBackend, Channel | None, int]:
        distributed.initialize(config)
        backend = MegatronBackend(config, Path(config.policy.model_name))
        return backend, Channel() if dist.get_world_size() > 1 else None, dist.get_rank()

    # OpenMP keeps a pool per thread: all computing happens on this one, so that two pools never compete.
    with ThreadPoolExecutor(1, thread_name_prefix="compute") as compute:
        backend, channel, rank = compute.submit(start).result()
        try:
            if rank == 0:
                asyncio.run(compose.lead(config, name, backend, channel, compute))
            else:
                assert channel is not None
                compose.obey(config, backend, channel, compute)
        finally:
            compute.submit(distributed.shutdown).result()


def main() -> int:
    """Exit code: 0 when the run ended or drained, 1 when it failed, 2 for unusable configuration or data."""
    try:
        config, given = parse(sys.argv[1:])
        if given.check_data:
            check(config)
            return 0
    except (ConfigError, DataError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    setup_logging(given.name, config.telemetry.log_level)
    try:
        run(config, given.name)
    except DataError as error:
        log.error("%s", error)
        return EXIT_USAGE
    except StreamsError as error:
        log.error("%s", error)
        return EXIT_FAILED
    except Exception:  # the last line of defence: whatever it was goes into the log with its traceback
        log.exception("the trainer failed")
        return EXIT_FAILED
    return 0


if __name__ == "__main__":  # checkpointing spawns helpers that import this module
    sys.exit(main())
