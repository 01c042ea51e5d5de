"""What all studies share: the session that measures, and what it looks into."""
