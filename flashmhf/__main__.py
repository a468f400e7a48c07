"""``python -m flashmhf``: the console script."""

import sys

from .app.cli import main

sys.exit(main())
