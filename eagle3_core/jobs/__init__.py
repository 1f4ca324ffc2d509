"""Owned processes: start or re-join a supervised job, follow it, end it, leave nothing behind."""
