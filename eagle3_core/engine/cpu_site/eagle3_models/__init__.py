"""The models that SGLang registers at once on a CPU: importing all of its models takes longer than the rest of a start."""
