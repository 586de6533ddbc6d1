"""`python -m services.rollout --config FILE [key=value ...] [--name NAME]`: one rollout server."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from trireme.config import Config, ConfigError, load_config
from trireme.streams.errors import StreamsError
from trireme.telemetry.logs import setup_logging

log = logging.getLogger("services.rollout")

EXIT_FAILED = 1
EXIT_USAGE = 2


def parse(arguments: Sequence[str]) -> tuple[Config, str]:
    """The configuration and the name of this service. Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="python -m services.rollout", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the run's YAML file")
    parser.add_argument("--name", default="rollout-0", help="name in the registry and in logs")
    parser.add_argument("overrides", nargs="*", help="key=value, over the file")
    given = parser.parse_intermixed_args(arguments)
    return load_config(given.config, given.overrides), given.name


def main() -> int:
    """Exit code: 0 after a signal, 1 when the service failed, 2 for a configuration that cannot run."""
    try:
        config, name = parse(sys.argv[1:])
        setup_logging(name, config.telemetry.log_level)
        from services.rollout.app import run  # not before the configuration is known to be right: it takes seconds

        asyncio.run(run(config, name))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    except StreamsError as error:
        log.error("%s", error)
        return EXIT_FAILED
    except Exception:  # the last line of defence: whatever it was goes into the log with its traceback
        log.critical("the rollout service failed", exc_info=True)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
