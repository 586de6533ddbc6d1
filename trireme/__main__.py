"""`python -m trireme`: the command, where its script is not installed."""

from trireme.cli.main import app

if __name__ == "__main__":
    app(prog_name="trireme")
