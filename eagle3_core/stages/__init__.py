"""One module per stage, each with `run(context) -> Ref`; heavy imports come after the check for a committed output."""
