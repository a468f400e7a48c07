"""``python -m flashmhf_recipes``: the console script."""

from .cli import main

raise SystemExit(main())
