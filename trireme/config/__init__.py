"""Configuration of a run: strict models, a YAML loader, rules across keys. Imports neither torch nor vLLM."""

from trireme.config.errors import ConfigError
from trireme.config.loader import from_tree, load_config
from trireme.config.root import Config

__all__ = ["Config", "ConfigError", "from_tree", "load_config"]
