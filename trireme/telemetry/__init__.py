"""What a service says about itself: structured logs, and metrics and health over HTTP."""

from trireme.telemetry.http import HttpServer, serve_http
from trireme.telemetry.logs import setup_logging

__all__ = ["HttpServer", "serve_http", "setup_logging"]
