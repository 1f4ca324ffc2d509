"""Airflow operators: one per stage. They start jobs in the engine environment and pass references; no ML imports."""
