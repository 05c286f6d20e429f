"""Do: one plan in, one outcome out."""
