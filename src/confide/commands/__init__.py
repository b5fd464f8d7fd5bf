"""One module for each noun of the command line; `confide.cli` adds their functions, or their `app`, to the command.

A command imports what is heavy (torch, pydantic, yaml, rich) inside its function, so that `confide --help` stays fast.
"""
