"""What is built, and what it means: the config, the parameters, the steps as values, their work, FP64's answer."""
