"""The version, in a module that imports nothing: the build reads it, and back ends compare their library with it."""

__version__ = "0.2.0"
