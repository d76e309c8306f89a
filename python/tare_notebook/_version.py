"""The version of tare that carries this package: written when the wheel is made."""

__version__ = "0.0.0"
