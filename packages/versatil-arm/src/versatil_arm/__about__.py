"""The version of versatil-arm, in its only place."""

__version__ = "0.1.0"
