"""One module for each top-level block of the configuration; large blocks keep their inner blocks beside them."""
