"""Decide: which sequence computes which tokens in the next step, and who is to blame when it fails. Pure Python."""
