"""Linear layers whose operands are in 8 or 4 bits: formats, scales, recipes, and what each costs in accuracy."""
