"""The models that SGLang registers at once on a CPU: importing all of them takes longer than all else."""
