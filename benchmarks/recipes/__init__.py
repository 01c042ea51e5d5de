"""Linear layers whose operands are in 8 or 4 bits: the recipes, what each costs in accuracy, and how fast it is."""
