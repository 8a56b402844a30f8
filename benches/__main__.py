"""The one command line: ``python -m benches SCENE [options]``, ``python -m benches list``."""

from __future__ import annotations

import sys

from benches.driver import main

if __name__ == "__main__":
    sys.exit(main())
