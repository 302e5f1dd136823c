"""Choices a user makes, as dataclasses that know their environment variables and flags.

Nothing here imports torch while a module is loaded, so that the command line can read the fields cheaply.
"""
