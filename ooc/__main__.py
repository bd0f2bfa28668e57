"""`python -m ooc`: the command line without an installed script, as `torchrun -m ooc train ...` starts it."""

import sys

from ooc.cli.main import main

sys.exit(main())
