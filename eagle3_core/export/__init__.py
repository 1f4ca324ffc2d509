"""Turn a trained drafter into the directory SGLang loads, and parameter names of one dialect into another's."""
