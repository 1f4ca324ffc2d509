"""Measure any running SGLang server: load, counters, and the comparison with another server or a former run."""
