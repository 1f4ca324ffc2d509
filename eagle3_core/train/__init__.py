"""Train a drafter under torchrun, resumable at any moment."""
