"""What a run finds: results, their figures, the card, the records and their file."""
