"""`python -m kvjax`: the command line."""

import sys

from kvjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
