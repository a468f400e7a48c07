"""What can be measured: each module has ``add_options(parser)`` and ``cells(options, context)``, and may have
``report(record)``.
"""
