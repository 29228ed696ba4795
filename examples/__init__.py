"""Runnable examples; the tests use the models that the demo uses."""
