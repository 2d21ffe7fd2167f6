"""The package's version, defined only here."""

__version__ = "0.1.0"
