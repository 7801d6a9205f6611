"""``python -m omnipipeline_operator``."""

import sys

from omnipipeline_operator import cli

if __name__ == "__main__":
    sys.exit(cli.main(sys.argv[1:]))
