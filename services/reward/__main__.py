"""`python -m services.reward --config FILE [key=value ...]`: one reward server."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from services.reward.app import NotConfigured, run
from services.reward.verifiers.registry import Registry, VerifierError
from trireme.config import Config, ConfigError, load_config
from trireme.streams.errors import StreamsError
from trireme.telemetry.logs import setup_logging

log = logging.getLogger("services.reward")

EXIT_FAILED = 1
EXIT_USAGE = 2


def parse(arguments: Sequence[str]) -> tuple[Config, argparse.Namespace]:
    """The configuration, and what else was given. Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="python -m services.reward", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the run's YAML file")
    parser.add_argument("--name", default="reward-0", help="name in the registry and in logs")
    parser.add_argument("--check-verifiers", action="store_true", help="load the verifiers, then end")
    parser.add_argument("overrides", nargs="*", help="key=value, over the file")
    given = parser.parse_intermixed_args(arguments)
    return load_config(given.config, given.overrides), given


def main() -> int:
    """Exit code: 0 after a signal, 1 when the service failed, 2 for a configuration that cannot run."""
    try:
        config, given = parse(sys.argv[1:])
        if given.check_verifiers:
            Registry(config.reward.verifiers or ())
            return 0
    except (ConfigError, VerifierError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    setup_logging(given.name, config.telemetry.log_level)
    try:
        asyncio.run(run(config, given.name))
    except (VerifierError, NotConfigured) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    except StreamsError as error:
        log.error("%s", error)
        return EXIT_FAILED
    except Exception:  # the last line of defence: whatever it was goes into the log with its traceback
        log.exception("the reward service failed")
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
