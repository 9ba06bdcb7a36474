"""The version of versatil-x86, in its only place."""

__version__ = "0.1.0"
