"""One module per stage: read references, work, commit one output. `run(context) -> Ref`; heavy imports come after the check for a committed output."""
