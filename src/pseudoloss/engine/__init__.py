"""Runs any method: steps, epochs, checkpoints, files."""
