"""`python -m services.reward --config FILE [key=value ...]`: one reward server."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from services.reward.app import NotConfigured, run
from services.reward.verifiers.registry import VerifierError
from trireme.config import Config, ConfigError, load_config
from trireme.telemetry.logs import setup_logging

log = logging.getLogger("services.reward")

EXIT_FAILED = 1
EXIT_USAGE = 2


def parse(arguments: Sequence[str]) -> tuple[Config, str]:
    """The configuration and the name of this service. Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="python -m services.reward", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the run's YAML file")
    parser.add_argument("--name", default="reward-0", help="name in the registry and in logs")
    parser.add_argument("overrides", nargs="*", help="key=value, over the file")
    given = parser.parse_intermixed_args(arguments)
    return load_config(given.config, given.overrides), given.name


def main() -> int:
    """Exit code: 0 after a signal, 1 when the service failed, 2 for a configuration that cannot run."""
    try:
        config, name = parse(sys.argv[1:])
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    setup_logging(name, config.telemetry.log_level)
    try:
        asyncio.run(run(config, name))
    except (VerifierError, NotConfigured) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    except Exception:  # the last line of defence: whatever it was goes into the log with its traceback
        log.exception("the reward service failed")
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
