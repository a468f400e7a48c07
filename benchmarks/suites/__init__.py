"""What can be measured: modules with ``add_options(parser)``, ``cells(options, context)`` and perhaps ``report``."""
