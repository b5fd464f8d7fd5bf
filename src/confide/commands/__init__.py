"""One module for each noun of the command line; `mount` adds its commands to the app.

A command imports what is heavy (torch, pydantic, yaml, rich) inside its function, so that `confide --help` stays fast.
"""
