"""`python -m ooc.cli`: the command line without an installed script."""

import sys

from ooc.cli.main import main

sys.exit(main())
