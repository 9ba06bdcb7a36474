"""The version of versatil-passes, in its only place."""

__version__ = "0.1.0"
