"""``python -m flashmhf_recipes``: the console script."""

import sys

from .cli import main

sys.exit(main())
