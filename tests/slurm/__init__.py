"""Tests that need a real Slurm; they start a throw-away one themselves."""
