"""The `eagle3` command: every stage, whole runs, status, plans, repair; light enough for either environment."""
