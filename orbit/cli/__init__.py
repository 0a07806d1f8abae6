"""The `orbit` command: one module a subcommand, loaded when it is called.

Nothing of the library imports this package.
"""
