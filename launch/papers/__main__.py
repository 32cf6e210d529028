"""Runs the tables and figures of the papers, see core.py."""

import sys

from jaxprompt.errors import InputError
from launch.papers.core import main

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as error:
        print(f"papers: {error}", file=sys.stderr)
        sys.exit(2)
