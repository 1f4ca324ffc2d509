"""Train, export and evaluate EAGLE-3 drafters for SGLang. Importing this package costs nothing."""

__version__ = "0.1.0"
