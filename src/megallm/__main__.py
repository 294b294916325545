"""`python -m megallm` is the command `megallm`."""

import sys

from megallm.cli import main

sys.exit(main())
