"""`python -m roundpipe_core`."""

import sys

from ._command import main

if __name__ == "__main__":
    sys.exit(main())
