"""Models and pairs of modules that the suite is shown on."""
