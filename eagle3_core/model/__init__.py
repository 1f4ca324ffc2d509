"""The EAGLE-3 drafter: one decoder layer, its TTT unroll and its loss."""
