"""Command line: `python -m checkpoints_convert convert | check | inspect`."""

from __future__ import annotations

import io
import sys


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status of `commands.run`, or 130 after an interrupt."""
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(encoding="utf-8", errors="backslashreplace")  # a locale may lack the characters of names
    try:
        from checkpoints_convert import commands  # in the `try`, since this import takes seconds

        return commands.run(argv)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
