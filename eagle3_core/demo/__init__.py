"""The project's own tiny chat target, the prompts of the demo, and the scripts that made both."""
