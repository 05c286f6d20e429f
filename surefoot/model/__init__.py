"""The networks: one page per family, over shared layers."""
