"""Measure a drafter: acceptance arithmetic, parity, benchmark, report, gate."""
